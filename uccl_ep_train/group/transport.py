"""Which transport carries rows between domains: decided from what every rank says of its host.

Every rank decides by itself from the same answers, so all come to the same. What cannot work is an error on
all ranks that says what is missing where; nothing is replaced by something slower in silence.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from uccl_ep_train.core.native import probe_transports
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.group.answers import require
from uccl_ep_train.group.domains import memory_id
from uccl_ep_train.settings.config import EpConfig

NETWORKS = ("verbs", "ofi")
"""Transports that reach other hosts, the better first."""


@dataclass(frozen=True)
class Probe:
    """What a rank's host offers of one transport.

    text  what it would use, or what is missing
    link  what would carry the bytes: "memory" | "efa" | "rdma" | "tcp"
    """

    usable: bool
    text: str
    link: str = "rdma"


@dataclass(frozen=True)
class Place:
    """Where a rank runs. Those with equal `memory` can map each other's; `host` is for people."""

    host: str
    memory: str

    @classmethod
    def here(cls) -> Place:
        return cls(os.uname().nodename, memory_id())


def probes(value: Any) -> dict[str, Any]:
    """What a rank said that it has: of `probe`. Raises `ValueError` for what no rank says."""
    require(isinstance(value, dict), "no probes")
    require(all([type(part) for part in said] == [bool, str, str] for said in value.values()), "no probe")
    return value


@dataclass(frozen=True)
class Choice:
    """provider: of ofi, where all ranks have to take the same; None: as configured. why: for people."""

    name: str
    why: str
    provider: str | None = None

    def apply(self, config: EpConfig) -> EpConfig:
        provider = config.network.ofi_provider or self.provider
        return config.replace(transport=self.name, ofi_provider=provider)


def check_domains(config: EpConfig, topology: Topology, places: Sequence[Place]) -> None:
    """Raises `ConfigError` if a domain that was set has ranks that cannot map each other's memory; pure."""
    for ranks in topology.members:
        if len({places[rank].memory for rank in ranks}) > 1:
            name = "domain_size" if config.network.domains is None else "domains"
            raise ConfigError(
                f"{name} = {getattr(config.network, name)}: ranks {list(ranks)} would be a domain and share "
                f"no memory: {_hosts(places)}; allowed are smaller domains, or none set: then they are found"
            )


def probe(config: EpConfig, places: Sequence[Place]) -> dict[str, Any]:
    """This rank's answers, JSON-ready, about the transports that are in question: none on one host."""
    one_memory = len({place.memory for place in places}) == 1
    wanted = [name for name in NETWORKS if config.network.transport in (name, "auto")]
    if config.network.transport == "auto" and one_memory:
        wanted = []
    return {name: [usable, text, link] for name, usable, text, link in probe_transports(config, wanted)}


def choose(
    wanted: str,
    places: Sequence[Place],
    answers: Sequence[dict[str, Any]],
    *,
    num_domains: int,
    on_gpu: bool,
) -> Choice:
    """The transport of a group; pure.

    wanted   EpConfig.transport, the same on all ranks
    places   of the ranks, by rank
    answers  of `probe` on the ranks, by rank

    Raises `ConfigError` naming ranks and what they lack.
    """
    table = {name: [_answer(said, name) for said in answers] for name in NETWORKS}
    if wanted in NETWORKS:
        problem = _problem(wanted, table[wanted], places, on_gpu) or _mixed_providers(table[wanted], places)
        if problem:
            raise ConfigError(f"transport = {wanted!r}: {problem}")
        return Choice(wanted, "it was asked for")
    if num_domains == 1:
        return Choice("loop", "there is one domain, and no row leaves it")
    if len({place.memory for place in places}) == 1:
        return Choice(
            "loop",
            f"all {len(places)} ranks are on one host, {places[0].host}: "
            "copies in its memory beat the loopback of a NIC",
        )
    if wanted == "loop":
        raise ConfigError(
            "transport = 'loop': it copies inside one host, and the ranks are on several, or in containers "
            f"that share no memory: {_hosts(places)}; allowed is auto, verbs or ofi"
        )
    return _choose_network(table, places, on_gpu)


def _choose_network(table: dict[str, list[Probe]], places: Sequence[Place], on_gpu: bool) -> Choice:
    problems = {}
    for name in NETWORKS:
        probes = table[name]
        problem = _problem(name, probes, places, on_gpu)
        if problem:
            problems[name] = problem
            continue
        tcp = name == "ofi" and any(entry.link == "tcp" for entry in probes)
        what = "EFA on every rank" if name == "verbs" and probes[0].link == "efa" else "every rank has it"
        if tcp:
            what = "over TCP, which every rank has"
        missing = "".join(f"; not {better}: {why}" for better, why in problems.items())
        return Choice(name, f"{what} (rank 0: {probes[0].text}){missing}", "tcp" if tcp else None)
    lacks = "; ".join(f"{name}: {why}" for name, why in problems.items())
    raise ConfigError(
        f"transport = 'auto': nothing connects the hosts of the group ({_hosts(places)}); {lacks}; "
        "loop: it copies inside one host"
    )


def _answer(said: dict[str, Any], name: str) -> Probe:
    return (
        Probe(*said[name])
        if name in said
        else Probe(False, "this rank says nothing of it: does it run another version?")
    )


def _problem(name: str, probes: Sequence[Probe], places: Sequence[Place], on_gpu: bool) -> str:
    """Why a transport cannot connect all ranks; "" if it can."""
    lacking = [rank for rank, entry in enumerate(probes) if not entry.usable]
    if lacking:
        return "; ".join(
            f"{ranks_on(ranks, places)}: {text}"
            for text, ranks in _grouped((probes[rank].text, rank) for rank in lacking).items()
        )
    if on_gpu and any(entry.link == "tcp" for entry in probes):
        ranks = [rank for rank, entry in enumerate(probes) if entry.link == "tcp"]
        text = f"TCP cannot read the memory of a GPU ({probes[ranks[0]].text})"
        return f"{ranks_on(ranks, places)}: {text}"
    kinds = _grouped((entry.link == "efa", rank) for rank, entry in enumerate(probes))
    if name == "verbs" and len(kinds) == 2:
        have, lack = (ranks_on(kinds[efa], places) for efa in (True, False))
        return f"EFA reaches EFA only, and {have} would use it, {lack} another"
    return ""


def _mixed_providers(probes: Sequence[Probe], places: Sequence[Place]) -> str:
    kinds = _grouped((entry.link == "tcp", rank) for rank, entry in enumerate(probes))
    if len(kinds) == 1:
        return ""
    each = "; ".join(f"{ranks_on(ranks, places)}: {probes[ranks[0]].text}" for ranks in kinds.values())
    return f"ranks would take providers that cannot talk ({each}); set ofi_provider"


def _grouped(pairs: Iterable[tuple[Any, int]]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for key, rank in pairs:
        groups.setdefault(key, []).append(rank)
    return groups


def _hosts(places: Sequence[Place]) -> str:
    groups = _grouped((place.memory, rank) for rank, place in enumerate(places))
    return "; ".join(ranks_on(ranks, places) for ranks in groups.values())


def ranks_on(ranks: Sequence[int], places: Sequence[Place]) -> str:
    """ "ranks 0-3, 8 on node1"; the hosts only where they are one or two."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    hosts = list(dict.fromkeys(places[rank].host for rank in ranks))
    names = " and ".join(hosts) if len(hosts) <= 2 else f"{len(hosts)} hosts"
    return f"rank{'s' if len(ranks) > 1 else ''} {text} on {names}"


_said: set[str] = set()
_said_lock = threading.Lock()


def announce(choice: Choice) -> None:
    """One line on stderr: what "auto" came to, and why. Once per process and choice."""
    line = f"uccl_ep_train: transport {choice.name}: {choice.why}"
    with _said_lock:
        if line in _said:
            return
        _said.add(line)
    print(line, file=sys.stderr, flush=True)
