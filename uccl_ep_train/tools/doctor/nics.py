"""Check `nics`: RDMA NICs as sysfs shows them: links, speed, addresses, packet size, distance to the GPU.

Nothing here talks to a NIC; check `registration` does. `root` stands for /sys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_train.core.native import SYSFS, HostNic, Surroundings, host_nics, load_native, rank_nics
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.tools.doctor.findings import (
    FIX,
    WARNING,
    Facts,
    Finding,
    Group,
    Said,
    each,
    equal,
    fine,
    fix,
    warning,
)
from uccl_ep_train.tools.doctor.session import Here, Options

NAME = "nics"
ROCE_MTU = 4200
"""bytes of an Ethernet frame's payload from which on RoCE sends packets of 4096"""
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem", "ib_peer_mem")
_MAPPED_IPV4 = "0000:0000:0000:0000:0000:ffff:"


def look(here: Here) -> dict[str, Any]:
    return see(here, SYSFS)


def see(here: Here, root: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "nics": {nic.name: _of_nic(nic, root) for nic in host_nics(root)},
        "chosen": [],
        "refused": "",
        "gpu_numa": -1,
        "modules": [name for name in _PEER_MODULES if (root / "module" / name).exists()],
        "forced_gid": -1,
        "transport": "auto",
        "on_gpu": here.gpu >= 0,
    }
    if here.config is None:
        return facts
    facts["forced_gid"] = here.config.network.ib_gid_index
    facts["transport"] = here.config.network.transport
    around = surroundings(here)
    facts["gpu_numa"] = _gpu_numa(around.near_pci, root)
    try:
        facts["chosen"] = [nic.name for nic in rank_nics(here.config, around, root)]
    except ConfigError as error:
        facts["refused"] = str(error)
    return facts


def surroundings(here: Here) -> Surroundings:
    """As a buffer's creation has them: the ranks of a host share its NICs."""
    hosts = Topology.from_domains(here.topology().host_of)
    own = here.group.index(here.me.rank)
    near = load_native().gpu_pci_address(here.gpu) if here.gpu >= 0 and _with_cuda() else ""
    return Surroundings(hosts.local_rank(own), len(hosts.members[hosts.domain_of[own]]), near)


def _with_cuda() -> bool:
    return hasattr(load_native(), "gpu_pci_address")


def _gpu_numa(address: str, root: Path) -> int:
    path = root / "bus/pci/devices" / address.lower()[-12:] / "numa_node"
    return int(_line(path) or -1) if address else -1


def _of_nic(nic: HostNic, root: Path) -> dict[str, Any]:
    port = root / "class/infiniband" / nic.name / "ports" / str(nic.port)
    gids = []
    for path in sorted(port.glob("gids/*"), key=lambda path: int(path.name)):
        address = _line(path)
        if address.strip("0:"):
            index = path.name
            kind = _line(port / "gid_attrs/types" / index)
            gids.append({"index": int(index), "address": address, "type": kind})
    interfaces = {_line(path) for path in port.glob("gid_attrs/ndevs/*")} - {""}
    interfaces |= {path.name for path in (root / "class/infiniband" / nic.name / "device/net").glob("*")}
    mtus = [int(_line(root / "class/net" / name / "mtu") or 0) for name in sorted(interfaces)]
    return {
        "family": nic.family,
        "link_layer": nic.link_layer,
        "state": nic.state,
        "gbits_per_s": nic.gbits_per_s,
        "numa_node": nic.numa_node,
        "pci_path": nic.pci_path,
        "gids": gids,
        "interfaces": sorted(interfaces),
        "mtu": max(mtus, default=0),
    }


def _line(path: Path) -> str:
    """An entry of a GID table that is not used cannot be read, which is as good as empty."""
    try:
        return path.read_text().split("\n", 1)[0].strip()
    except OSError:
        return ""


def judge(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    def of_rank(rank: int, seen: Facts) -> list[Said]:
        wanted = seen["transport"] in ("verbs",) or (group.spans_hosts and seen["transport"] == "auto")
        problems = [*_links(seen, wanted), *_addresses(seen, wanted), *_packets(seen), *_distance(seen)]
        return problems or [_summary(seen, wanted, group.spans_hosts)]

    found = each(NAME, facts, of_rank)
    used = {rank: {**seen, "count": len(seen["chosen"]), **_kind(seen)} for rank, seen in facts.items()}
    if group.spans_hosts and any(seen["chosen"] for seen in facts.values()):
        found += equal(
            NAME, used, "count", "the number of NICs they use", "name as many on each in UCCL_EP_NICS", FIX
        )
        found += equal(
            NAME, used, "speed", "the speed of their NICs", "the slowest sets the pace of all", WARNING
        )
        found += equal(
            NAME,
            used,
            "mtu",
            "the MTU of their NICs",
            "set one MTU on all NICs and switches of the fabric",
            WARNING,
        )
    return found


def _kind(seen: Facts) -> dict[str, Any]:
    nics = [seen["nics"][name] for name in seen["chosen"] if name in seen["nics"]]
    return {
        "speed": ", ".join(f"{nic['gbits_per_s']:g} Gb/s" for nic in nics[:1]),
        "mtu": ", ".join(str(nic["mtu"]) for nic in nics[:1] if nic["link_layer"] == "Ethernet"),
    }


def _links(seen: Facts, wanted: bool) -> list[Said]:
    down = [
        f"{name} is {nic['state'] or 'without a port'}"
        for name, nic in seen["nics"].items()
        if nic["state"] != "ACTIVE"
    ]
    if seen["refused"] and (seen["nics"] or "nics =" in seen["refused"]):
        advice = "cable, switch port, driver (ibstat, rdma link); on InfiniBand the subnet manager (INIT)"
        return [(fix if wanted else warning)(seen["refused"], advice)]
    if down:
        return [
            warning(f"a link is not up: {', '.join(down)}", "cable, switch port, driver: ibstat, rdma link")
        ]
    return []


def _addresses(seen: Facts, wanted: bool) -> list[Said]:
    level = fix if wanted else warning
    said = []
    for name in seen["chosen"]:
        nic = seen["nics"][name]
        if nic["link_layer"] != "Ethernet":
            continue
        routable = [
            gid["index"]
            for gid in nic["gids"]
            if gid["type"] == "RoCE v2" and gid["address"].startswith(_MAPPED_IPV4)
        ]
        hint = f"; RoCE v2 with an IPv4 address: {', '.join(map(str, routable)) or 'none'}"
        if seen["forced_gid"] < 0:
            if not routable:
                said.append(
                    level(
                        f"{name} has no GID of RoCE v2 with an IPv4 address, only {_types(nic)}",
                        f"give its interface ({', '.join(nic['interfaces']) or 'none is shown'}) an "
                        f"IPv4 address; in a\n"
                        "container without the host's network the table may be empty: use hostNetwork "
                        "or an RDMA CNI",
                    )
                )
            continue
        entry = next((gid for gid in nic["gids"] if gid["index"] == seen["forced_gid"]), None)
        if entry is None:
            said.append(
                level(
                    f"UCCL_EP_IB_GID_INDEX is {seen['forced_gid']}, and {name} has {_types(nic)}{hint}",
                    "unset it, or set it to one that all NICs have (show_gids; NCCL_IB_GID_INDEX likewise)",
                )
            )
        elif entry["type"] != "RoCE v2":
            said.append(
                level(
                    f"UCCL_EP_IB_GID_INDEX is {seen['forced_gid']}, which on {name} is "
                    f"{entry['type'] or 'of no type'}{hint}",
                    "RoCE v1 is not routed: unset it, or set the index of a RoCE v2 entry",
                )
            )
    return said


def _types(nic: Mapping[str, Any]) -> str:
    return ", ".join(f"{gid['index']} ({gid['type']})" for gid in nic["gids"]) or "no GID at all"


def _packets(seen: Facts) -> list[Said]:
    small = [
        f"{name} {seen['nics'][name]['mtu']}"
        for name in seen["chosen"]
        if seen["nics"][name]["link_layer"] == "Ethernet" and 0 < seen["nics"][name]["mtu"] < ROCE_MTU
    ]
    if not small:
        return []
    return [
        warning(
            f"small packets: the MTU is {', '.join(small)}; RoCE sends 4096 bytes a packet from "
            f"{ROCE_MTU} on",
            "ip link set dev <interface> mtu 9000 on all hosts, and as much on every switch port "
            "between them",
        )
    ]


def _distance(seen: Facts) -> list[Said]:
    if not seen["on_gpu"] or seen["gpu_numa"] < 0:
        return []
    far = [
        name
        for name in seen["chosen"]
        if seen["nics"][name]["numa_node"] >= 0 and seen["nics"][name]["numa_node"] != seen["gpu_numa"]
    ]
    if not far:
        return []
    return [
        warning(
            f"{', '.join(far)} is on another socket than the rank's GPU (NUMA node {seen['gpu_numa']})",
            "a nearer NIC is down, or was not given to this container; UCCL_EP_NICS names others",
        )
    ]


def _summary(seen: Facts, wanted: bool, spans_hosts: bool) -> Said:
    if not seen["nics"]:
        if wanted:
            return warning(
                "no RDMA NIC: /sys/class/infiniband is empty",
                "if the host has one: its driver, and in a container /dev/infiniband (an rdma/... "
                "resource) are missing.\n"
                "Else rows go over TCP by libfabric, from CPU memory only",
            )
        why = f"for transport {seen['transport']}" if spans_hosts else "on one host"
        return fine(f"no RDMA NIC, and none is needed {why}")
    nics = [seen["nics"][name] for name in seen["chosen"]]
    kinds = sorted({f"{nic['family']}, {nic['link_layer']}, {nic['gbits_per_s']:g} Gb/s" for nic in nics})
    modules = f"; {', '.join(seen['modules'])} loaded" if seen["modules"] else ""
    return fine(f"{', '.join(seen['chosen'])} of {len(seen['nics'])} ({'; '.join(kinds)}), up{modules}")
