#!/usr/bin/env bash
# Makes several hosts on one machine, and runs a command on each of them, as a cluster's launcher would.
#
#   ./scripts/several_hosts.sh [--hosts N] COMMAND...      (default 2)
#
#   ./scripts/several_hosts.sh bash -c '.venv/bin/torchrun --nnodes=2 --node_rank=$NODE_RANK --nproc_per_node=2 \
#       --master_addr=$MASTER_ADDR --master_port=29500 -m uccl_ep_train.doctor'
#
# A host is a set of Linux namespaces. It has its own network (eth0, 10.77.0.1 for the first), host name (node0, ...),
# boot id, processes, System V memory and /dev/shm. Files and the clock are this machine's. Each command has NODE_RANK,
# NNODES and MASTER_ADDR=node0. It has root's rights over its network: `ip link set eth0 down` cuts the host off. Each line
# that it prints begins with its host's name. Nothing is left when this script ends.
#
# The exit code is that of the first host whose command failed, 2 for wrong usage, or
#     77  such namespaces are not possible here; the last line says why

set -euo pipefail

PATH="$PATH:/usr/sbin:/sbin"
hosts=2

bad_use() {
  printf '%s\nsee the head of scripts/several_hosts.sh\n' "$*" >&2
  exit 2
}

no_hosts() {
  printf '[several_hosts] no namespaces: %s\n' "$*" >&2
  exit 77
}

# network_of PID: the network namespace of a process.
network_of() { readlink "/proc/$1/ns/net"; }

# host NUMBER FOLDER COMMAND...: the first process of a host.
host() {
  local number="$1" folder="$2"
  shift 2
  mount -t proc proc /proc
  mount -t tmpfs -o size=50% tmpfs /dev/shm
  mount --bind "$folder/boot_id$number" /proc/sys/kernel/random/boot_id
  mount --bind "$folder/names" /etc/hosts
  hostname "node$number"
  until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
  ip link set lo up
  ip address add "10.77.0.$((number + 1))/24" dev eth0
  ip link set eth0 up
  export NODE_RANK="$number" NNODES="$hosts" MASTER_ADDR=node0
  # Not exec: the first process of a namespace ignores signals that it does not handle.
  "$@"
}

# world COMMAND...: runs in namespaces of its own, which hold the switch between the hosts.
world() {
  local number pid pids=() status=0 code
  mount --make-rprivate /
  mount -t proc proc /proc
  ip link add switch type bridge
  ip link set switch up
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' EXIT
  echo '127.0.0.1 localhost' >"$folder/names"
  for ((number = 0; number < hosts; number++)); do
    echo "10.77.0.$((number + 1)) node$number" >>"$folder/names"
    cat /proc/sys/kernel/random/uuid >"$folder/boot_id$number"
  done
  for ((number = 0; number < hosts; number++)); do
    # The host's own output goes through a process that outlives it, so that its last line is not lost.
    unshare --net --mount --uts --ipc --pid --fork --kill-child "$BASH" "$0" --host "$hosts" "$number" "$folder" "$@" \
      > >(exec sed -u "s/^/node$number: /") 2>&1 </dev/null &
    pid=$!
    pids+=("$pid")
    until [ "$(network_of "$pid")" != "$(network_of self)" ]; do sleep 0.02; done
    ip link add "to$number" type veth peer name eth0 netns "$pid"
    ip link set "to$number" master switch
    ip link set "to$number" up
  done
  for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    [ "$status" -ne 0 ] || status="$code"
  done
  # Waits for the last lines of output.
  while [ "$(jobs -rp | wc -l)" -gt 0 ]; do sleep 0.02; done
  return "$status"
}

if [ "${1-}" = --host ] || [ "${1-}" = --world ]; then # this script calls itself
  role="${1#--}" hosts="$2"
  shift 2
  "$role" "$@"
  exit
fi

while [ $# -gt 0 ]; do
  case "$1" in
    --hosts)
      [[ "${2-}" =~ ^[0-9]+$ ]] && [ "$2" -ge 1 ] && [ "$2" -le 200 ] || bad_use "--hosts ${2-}: allowed is 1 .. 200"
      hosts="$2" && shift 2
      ;;
    -*) bad_use "unknown option $1" ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || bad_use "no command"
for program in unshare ip mount hostname; do
  command -v "$program" >/dev/null || no_hosts "there is no $program (packages util-linux, iproute2, mount, hostname)"
done
namespaces=(--net --mount --pid --fork --kill-child)
# A user who is not root may be root in a user namespace.
[ "$(id -u)" -eq 0 ] || namespaces+=(--user --map-root-user)
allowed="$(unshare "${namespaces[@]}" "$BASH" -c 'mount --make-rprivate / && mount -t proc proc /proc && ip link add probe type bridge' 2>&1)" ||
  no_hosts "${allowed:-unshare is not permitted}"
unshare "${namespaces[@]}" "$BASH" "$0" --world "$hosts" "$@"
