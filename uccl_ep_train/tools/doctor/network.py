"""Checks `sockets`, `clocks`, `transport` and `registration`: what ranks need to reach each other."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_train.core.native import SYSFS, Surroundings, probe_transports, try_registration
from uccl_ep_train.core.stats import memory_plan
from uccl_ep_train.errors import EpError
from uccl_ep_train.group.bootstrap import Bootstrap, LocalBootstrap, StoreBootstrap
from uccl_ep_train.group.lifecycle import settle_config
from uccl_ep_train.settings import env
from uccl_ep_train.tools.doctor.findings import OK, Facts, Finding, Group, Said, each, fine, fix, warning
from uccl_ep_train.tools.doctor.memory import MIB, split
from uccl_ep_train.tools.doctor.nics import surroundings
from uccl_ep_train.tools.doctor.session import Here, Options, Skipped

SOCKETS, CLOCKS, TRANSPORT, REGISTRATION = "sockets", "clocks", "transport", "registration"
TOLERANCE_S = 0.010
"""Of clocks: what makes lines of logs and of joined traces appear in the wrong order."""
_ROUNDS = 5


def bootstrap_of(here: Here, what: str) -> Bootstrap:
    """For the rank's expert-parallel group; what waits there gives up within the deadline of a check."""
    timeout_s = 0.8 * here.options.timeout_s
    if here.meeting.store is None:
        return LocalBootstrap.create(1)[0]
    group = here.group
    return StoreBootstrap(
        here.meeting.store,
        group.index(here.me.rank),
        len(group),
        name=f"doctor/{what}/{group.start}",
        timeout_s=timeout_s,
    )


def leaders(here: Here) -> list[int]:
    """The first rank of each host; on one host all ranks."""
    firsts: dict[str, int] = {}
    for rank, place in enumerate(here.places):
        firsts.setdefault(place.host, rank)
    return sorted(firsts.values()) if len(firsts) > 1 else list(range(here.me.size))


# ------------------------------------------------------------------------------------------- sockets


def look_at_sockets(here: Here) -> dict[str, Any]:
    """gloo, which every job needs for its control plane, connects by the same rules as it would in a job."""
    facts: dict[str, Any] = {
        "ran": False,
        "error": "",
        "interface": env.read("GLOO_SOCKET_IFNAME"),
        "address": _own_address(),
        "interfaces": interfaces_up(SYSFS),
    }
    members = leaders(here)
    if here.meeting.store is None or here.me.rank not in members:
        return facts
    import torch
    import torch.distributed as dist

    store = dist.PrefixStore("sockets", here.meeting.store.real)
    patience = datetime.timedelta(seconds=0.5 * here.options.timeout_s)
    try:
        group: Any = dist.ProcessGroupGloo(store, members.index(here.me.rank), len(members), patience)
        count = torch.ones(1)
        group.allreduce([count]).wait()
        facts["ran"] = int(count) == len(members)
        facts["error"] = "" if facts["ran"] else f"gloo counted {int(count)} ranks, not {len(members)}"
    except RuntimeError as error:
        facts["error"] = str(error).splitlines()[0][:200]
    return facts


def _own_address() -> str:
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return ""


def interfaces_up(root: Path) -> list[str]:
    """Network interfaces that are up, but the loopback."""
    up = []
    for folder in sorted((root / "class/net").glob("*")):
        try:
            state = (folder / "operstate").read_text().strip()
        except OSError:
            continue
        if folder.name != "lo" and state != "down":
            up.append(folder.name)
    return up


def judge_sockets(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    def of_rank(rank: int, seen: Facts) -> list[Said]:
        if not seen["error"]:
            return []
        local = seen["address"].startswith("127.") or seen["address"] in ("", "::1")
        why = (
            f"this host's own name has the address {seen['address'] or '(none)'}"
            if local
            else "a firewall, perhaps"
        )
        return [
            fix(
                f"gloo does not connect the hosts: {seen['error']} (GLOO_SOCKET_IFNAME is "
                f"{seen['interface'] or 'not set'}; {why})",
                "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the network that all "
                "hosts share;\n"
                f"up here: {', '.join(seen['interfaces']) or 'none'}",
            )
        ]

    found = each(SOCKETS, facts, of_rank)
    ran = sum(bool(seen["ran"]) for seen in facts.values())
    if found or not ran:
        return found
    return [
        Finding(
            SOCKETS, OK, f"the store and gloo connect {ran} {'hosts' if group.num_hosts > 1 else 'ranks'}"
        )
    ]


# -------------------------------------------------------------------------------------------- clocks


def look_at_clocks(here: Here) -> dict[str, Any]:
    """The clock of each host's first rank against rank 0's, asked over the store: half of a round trip is not
    known. {"offset_s", "error_s"}, or {} for who has not been asked."""
    asked = [rank for rank in leaders(here) if rank != 0]
    if here.meeting.store is None or len({place.host for place in here.places}) == 1:
        return {}
    if here.me.rank == 0:
        for rank in asked:
            for count in range(_ROUNDS):
                _wait(here, f"clock/ask/{rank}/{count}", rank)
                here.meeting.store.set(f"clock/answer/{rank}/{count}", repr(time.time()))
        return {}
    return _ask(here) if here.me.rank in asked else {}


def _ask(here: Here) -> dict[str, Any]:
    store, rank = here.meeting.store, here.me.rank
    best = (float("inf"), 0.0)
    for count in range(_ROUNDS):
        asked = time.time()
        store.set(f"clock/ask/{rank}/{count}", "")
        _wait(here, f"clock/answer/{rank}/{count}", 0)
        answered = time.time()
        theirs = float(bytes(store.get(f"clock/answer/{rank}/{count}")))
        best = min(best, (answered - asked, (asked + answered) / 2 - theirs))
    return {"offset_s": best[1], "error_s": best[0] / 2}


def _wait(here: Here, key: str, rank: int) -> None:
    """Looks often: what it misses by is in the measurement."""
    deadline = time.monotonic() + 0.8 * here.options.timeout_s
    while not here.meeting.store.check([key]):
        if time.monotonic() > deadline:
            raise EpError(f"rank {rank} did not take part in comparing clocks")
        time.sleep(0.0002)


def judge_clocks(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    measured = {rank: seen for rank, seen in facts.items() if "offset_s" in seen}
    if not measured:
        return [] if group.num_hosts > 1 else [Finding(CLOCKS, OK, "one host, one clock")]

    def of_rank(_: int, seen: Facts) -> list[Said]:
        offset, error = seen["offset_s"], seen["error_s"]
        if abs(offset) - error <= TOLERANCE_S:
            return []
        return [
            warning(
                f"its clock is {abs(offset) * 1e3:.0f} ms {'ahead of' if offset > 0 else 'behind'} that "
                f"of rank 0's host "
                f"(± {error * 1e3:.1f})",
                "nothing fails by it; times in logs and joined traces mislead. Run chrony or ntpd on "
                "all hosts",
            )
        ]

    found = each(CLOCKS, measured, of_rank)
    worst = max(abs(seen["offset_s"]) for seen in measured.values())
    return found or [Finding(CLOCKS, OK, f"the hosts' clocks agree within {worst * 1e3:.1f} ms")]


# ----------------------------------------------------------------------------------------- transport


def look_at_transport(here: Here) -> dict[str, Any]:
    """What a buffer's creation decides before it allocates anything: domains and transport."""
    here.settled = settle_config(bootstrap_of(here, TRANSPORT), here.usable_config())
    settled = here.settled
    return {
        "name": settled.config.network.transport,
        "why": settled.why,
        "provider": settled.config.network.ofi_provider or "",
        "nics": settled.nics,
        "domains": str(settled.topology),
        "num_domains": settled.topology.num_domains,
        "on_gpu": settled.device.type == "cuda",
    }


def judge_transport(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    def of_rank(_: int, seen: Facts) -> list[Said]:
        what = f"{seen['name']}: {seen['why']}; {seen['domains']}"
        if seen["provider"] != "tcp" or seen["num_domains"] == 1:
            return [fine(what)]
        return [
            warning(
                f"{what}. Rows go over TCP, far slower than RDMA",
                "where the hosts have RDMA NICs check `nics` says what is in their way; "
                "UCCL_EP_NET_INTERFACE names\n"
                "the interface of TCP",
            )
        ]

    return each(TRANSPORT, facts, of_rank)


# -------------------------------------------------------------------------------------- registration


def look_at_registration(here: Here) -> dict[str, Any]:
    """Opens the NICs and registers as much memory as a buffer of the job would: with the transport that was
    chosen, and, where that is copies inside one host, with those that would be in question between hosts.
    """
    if here.settled is None:
        raise Skipped("no transport was chosen, see there")
    settled = here.settled
    on_gpu = settled.device.type == "cuda"
    plan = split(memory_plan(settled.config, settled.topology, here.group.index(here.me.rank)), on_gpu=on_gpu)
    around = surroundings(here)
    trials = []
    for name, chosen in _in_question(here):
        config = settled.config.replace(transport=name)
        trials.append([name, chosen, _try(config, around, plan, here.gpu if on_gpu else -1)])
    return {"trials": trials, "host_bytes": plan["shm_bytes"], "gpu_bytes": plan["gpu_bytes"]}


def _in_question(here: Here) -> list[tuple[str, bool]]:
    """(transport, whether it is the one that was chosen)."""
    assert here.settled is not None
    config = here.settled.config
    if config.network.transport != "loop":
        return [(config.network.transport, True)]
    others = probe_transports(config, ["verbs", "ofi"])
    return [("loop", True)] + [(name, False) for name, usable, _, link in others if usable and link != "tcp"]


def _try(config: Any, around: Surroundings, plan: Mapping[str, Any], device: int) -> str:
    """ "" or what went wrong."""
    try:
        try_registration(
            config,
            around,
            plan["shm_bytes"],
            device=device,
            device_bytes=plan["gpu_bytes"] if device >= 0 else 0,
        )
    except (EpError, RuntimeError) as error:
        return str(error)
    return ""


def judge_registration(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    def of_rank(_: int, seen: Facts) -> list[Said]:
        said: list[Said] = []
        gpu = f" and {seen['gpu_bytes'] / MIB:.0f} MiB of the GPU" if seen["gpu_bytes"] else ""
        for name, chosen, error in seen["trials"]:
            if not error:
                took = "mapped" if name == "loop" else "registered"
                said.append(fine(f"{name} has {took} {seen['host_bytes'] / MIB:.0f} MiB of the host{gpu}"))
            elif chosen:
                said.append(fix(f"{name}: {error}", "docs/nics.md lists such messages with what to do"))
            else:
                said.append(
                    warning(
                        f"{name}, which a job of several hosts would use: {error}",
                        "docs/nics.md lists such messages with what to do",
                    )
                )
        return said

    return each(REGISTRATION, facts, of_rank)
