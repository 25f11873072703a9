"""Which transport carries rows between domains: decided from each rank's report on its host.

Every rank decides from the same reports, so all make the same choice. If nothing works, all ranks raise an
error that says what is missing on which rank. There is no silent fallback to a slower transport.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from uccl_ep_train.common.shown import cut, shown
from uccl_ep_train.core.native import load_native, probe_transports
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.group.answers import require
from uccl_ep_train.group.domains import memory_id
from uccl_ep_train.settings.config import EpConfig

NETWORKS = ("verbs", "ofi")
"""Transports that reach other hosts, the better first."""
_NICS = "nics"
"""In a report beside the transports: whether a program named NICs, their names, the source of that."""


class Place(NamedTuple):
    """Where a rank runs. Ranks with equal `memory` can map each other's; `host` is for messages."""

    host: str
    memory: str

    @classmethod
    def here(cls) -> Place:
        return cls(os.uname().nodename, memory_id())


def probes(value: Any) -> dict[str, Any]:
    """A rank's report from `probe`. Raises `ValueError` if it is not valid."""
    require(isinstance(value, dict), "no probes")
    for said in value.values():
        require(isinstance(said, list) and [type(part) for part in said] == [bool, str, str], "no probe")
    return value


@dataclass(frozen=True)
class Choice:
    """provider: of ofi, if all ranks must take the same; None: as configured. why: for messages."""

    name: str
    why: str
    provider: str | None = None

    def apply(self, config: EpConfig) -> EpConfig:
        provider = config.network.ofi_provider or self.provider
        return config.replace(transport=self.name, ofi_provider=provider)


def check_domains(config: EpConfig, topology: Topology, places: Sequence[Place]) -> None:
    """Raises `ConfigError` if a configured domain has ranks of several hosts: they cannot map each other's
    memory. No side effects.
    """
    for ranks in topology.members:
        if len({topology.host_of[rank] for rank in ranks}) > 1:
            name = "domain_size" if config.network.domains is None else "domains"
            raise ConfigError(
                f"{name} = {shown(getattr(config.network, name))}: ranks {list(ranks)} would be a domain and "
                f"share no memory: {_hosts(places)}; allowed are smaller domains, or none set: then they are "
                "found"
            )


def probe(config: EpConfig, places: Sequence[Place]) -> dict[str, Any]:
    """This rank's answers, JSON-ready, about candidate transports (on one host about none), and `_NICS`."""
    one_memory = len({place.memory for place in places}) == 1
    wanted = [name for name in NETWORKS if config.network.transport in (name, "auto")]
    if config.network.transport == "auto" and one_memory:
        wanted = []
    found = {name: [usable, text, link] for name, usable, text, link in probe_transports(config, wanted)}
    if config.network.nics is not None:
        source = config.source("nics")
        found[_NICS] = [source == "argument", ",".join(config.network.nics), source]
    return found


def choose(
    wanted: str,
    places: Sequence[Place],
    answers: Sequence[dict[str, Any]],
    *,
    num_domains: int,
    on_gpu: bool,
) -> Choice:
    """The transport of a group, chosen by the native core. No side effects.

    wanted   EpConfig.transport, the same on all ranks
    places   of the ranks, by rank
    answers  of `probe` on the ranks, by rank

    Raises `ConfigError` naming ranks and what they lack.
    """
    offers = [{name: said for name, said in answer.items() if name != _NICS} for answer in answers]
    name, why, provider = load_native().choose_transport(wanted, places, offers, num_domains, on_gpu)
    if name == "loop" and num_domains > 1:
        why += _idle_nics(wanted, why, places, answers)
    return Choice(name, why, provider or None)


def _idle_nics(wanted: str, why: str, places: Sequence[Place], answers: Sequence[dict[str, Any]]) -> str:
    """For messages: the NICs of variables that have no effect, because loop was chosen; may be empty.

    Variables often are those of a whole cluster. But a program that names NICs wants them used: ConfigError.
    """
    told = [(tuple(said[_NICS]), rank) for rank, said in enumerate(answers) if _NICS in said]
    text = ""
    for (by_program, nics, source), ranks in _grouped(told).items():
        if by_program:
            raise ConfigError(
                f"nics = {shown(nics)} ({ranks_on(ranks, places)}): transport = {wanted!r} takes loop, which "
                f"uses no NIC: {why}; allowed is transport = 'verbs' or 'ofi', which use them, or no nics"
            )
        text += f"; nics = {cut(nics)} has no effect ({source}, {ranks_on(ranks, places)})"
    return text


def _grouped(pairs: Iterable[tuple[Any, int]]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for key, rank in pairs:
        groups.setdefault(key, []).append(rank)
    return groups


def _hosts(places: Sequence[Place]) -> str:
    groups = _grouped((place.memory, rank) for rank, place in enumerate(places))
    return "; ".join(ranks_on(ranks, places) for ranks in groups.values())


def ranks_on(ranks: Sequence[int], places: Sequence[Place]) -> str:
    """ "ranks 0-3, 8 on node1"; hosts only if there are one or two."""
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
    """One line on stderr: what "auto" selected, and why. Once per process and choice."""
    line = f"uccl_ep_train: transport {choice.name}: {choice.why}"
    with _said_lock:
        if line in _said:
            return
        _said.add(line)
    print(line, file=sys.stderr, flush=True)
