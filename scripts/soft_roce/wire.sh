#!/usr/bin/env bash
# The two RDMA devices of the soft-RoCE VM and the link between them. In the VM this script is on PATH, also for tests:
#
#   soft_roce_wire make PERCENT   makes the devices and a link with this loss; the VM's init calls it once
#   soft_roce_wire loss PERCENT   from now on the link loses this share of packets, in each direction; 0: none
#   soft_roce_wire lost           prints how many packets the link has lost since
#   soft_roce_wire cut            the link loses all packets, as if a cable were pulled further away from the NIC
#   soft_roce_wire heal           restores the loss from before `cut`
#   soft_roce_wire down | up      the second device's port goes down, which the device reports, and comes back
#
# rxe0 (10.9.0.1) sits on veth0 and rxe1 (10.9.0.2) on veth1, the two ends of one pair. Packets between them do leave one
# end and enter the other. rxe short-circuits only packets to a device's own address, which are never lost.
set -euo pipefail

ENDS=(veth0 veth1)
MTU_BYTES=4200 # a RoCE packet of 4096 bytes and its headers
STATE=/run/soft_roce/loss

# Without these rules the kernel would directly deliver packets to its own addresses. The local table comes last for packets
# that are sent, and first for packets that have come in over the pair.
make_rules() {
  local name
  for name in all "${ENDS[@]}"; do
    echo 0 >"/proc/sys/net/ipv4/conf/$name/rp_filter"
    echo 1 >"/proc/sys/net/ipv4/conf/$name/accept_local"
  done
  ip rule add pref 1 iif veth0 lookup local
  ip rule add pref 2 iif veth1 lookup local
  ip rule add pref 3 iif lo to 127.0.0.0/8 lookup local
  ip rule add pref 4 to 10.9.0.2 lookup 10
  ip rule add pref 5 to 10.9.0.1 lookup 11
  ip rule add pref 100 lookup local
  ip rule del pref 0
}

# Routes vanish when the port of their device goes down: after `down` they must be made again.
make_routes() {
  ip route replace 10.9.0.2/32 dev veth0 src 10.9.0.1 table 10
  ip route replace 10.9.0.1/32 dev veth1 src 10.9.0.2 table 11
}

# lose PERCENT: sets the loss on both ends, because each end sees only what it sends.
lose() {
  local name
  for name in "${ENDS[@]}"; do
    if [ "$1" = 0 ]; then
      tc qdisc del dev "$name" root 2>/dev/null || true
    else
      tc qdisc replace dev "$name" root netem loss "$1%"
    fi
  done
}

# tc's line: Sent 90 bytes 1 pkt (dropped 2, overlimits 0 requeues 0)
lost() {
  local name
  for name in "${ENDS[@]}"; do tc -s qdisc show dev "$name"; done |
    awk '/dropped/ { gsub(/,/, ""); sum += $7 } END { print sum + 0 }'
}

# is_ready DEVICE "the address, as it ends the device's GID"
is_ready() {
  local port="/sys/class/infiniband/$1/ports/1"
  grep -q ACTIVE "$port/state" && grep -qs "$2" "$port"/gids/*
}

# An address enters the device's table of GIDs a moment after it was assigned.
wait_for_devices() {
  local attempt device
  for attempt in {1..100}; do
    ! { is_ready rxe0 0a09:0001 && is_ready rxe1 0a09:0002; } || return 0
    sleep 0.1
  done
  printf 'soft_roce_wire: the devices are not ready after 10 s\n' >&2
  for device in rxe0 rxe1; do cat "/sys/class/infiniband/$device/ports/1/"{state,gids/?} >&2; done
  exit 1
}

make() {
  ip link set lo up
  ip link add veth0 mtu "$MTU_BYTES" type veth peer name veth1 mtu "$MTU_BYTES"
  ip addr add 10.9.0.1/24 dev veth0
  ip addr add 10.9.0.2/24 dev veth1
  ip link set veth0 up
  ip link set veth1 up
  rdma link add rxe0 type rxe netdev veth0
  rdma link add rxe1 type rxe netdev veth1
  make_rules
  make_routes
  wait_for_devices
}

case "${1:-}" in
  make)
    make
    lose "$2"
    echo "$2" >"$STATE"
    ;;
  loss)
    lose "$2"
    echo "$2" >"$STATE"
    ;;
  lost) lost ;;
  cut) lose 100 ;;
  heal) lose "$(cat "$STATE")" ;;
  down) ip link set veth1 down ;;
  up)
    ip link set veth1 up
    make_routes
    wait_for_devices
    ;;
  *)
    printf '%s: none of make, loss, lost, cut, heal, down, up\n' "${1:-}" >&2
    exit 2
    ;;
esac
