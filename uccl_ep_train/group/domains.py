"""Which ranks form a domain: probed and verified, or configured, and always the same on every rank.

A domain is a set of ranks that can map each other's memory. csrc/engine/group/domains.h says how they find
out.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from uccl_ep_train.common import limits
from uccl_ep_train.core.native import load_native
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import RankMismatchError, TopologyError
from uccl_ep_train.group.answers import decode, decode_all, require, split
from uccl_ep_train.group.bootstrap import Bootstrap, exchange
from uccl_ep_train.settings.config import EpConfig

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Agreement(NamedTuple):
    """The generation key and the answers of the ranks, by rank. Rank 0 chooses the key: random, 64 bits,
    nonzero. It keeps flags of an earlier engine from being taken for those of this one.
    """

    generation: int
    said: list[Any]


def agree_on_config(
    bootstrap: Bootstrap, config: EpConfig, verify: Callable[[], Any], shape: Callable[[Any], Any]
) -> Agreement:
    """Ranks compare the settings that must be equal, agree on a generation key, and exchange the results of
    `verify`: any JSON value that `shape` accepts (see `answers.decode`).

    Raises `TopologyError` when ranks set different domains and `RankMismatchError` for any other setting;
    both name two ranks and their values, and every rank raises the same.
    """

    what, rank = "configuration", bootstrap.rank

    def mine() -> bytes:
        own = json.dumps(verify())
        return f"{secrets.randbits(64) or 1}\0{own}\0{json.dumps(config.agreed_values())}".encode()

    generations, owns, all_values = split(rank, what, exchange(bootstrap, what, mine))
    generation = decode(rank, what, 0, generations[0], _generation)
    said = decode_all(rank, what, owns, shape)
    same = all_values[0]
    first = decode(rank, what, 0, same, _values)
    for peer, theirs in enumerate(all_values):
        if theirs == same:  # as it should be of all, in a large group
            continue
        values = decode(rank, what, peer, theirs, _values)
        for name in sorted(set(first) | set(values)):
            if first.get(name) == values.get(name):
                continue
            message = (
                f"rank 0 has {name} = {first.get(name)!r}, rank {peer} has {name} = {values.get(name)!r}"
            )
            if name in ("domains", "domain_size"):
                raise TopologyError(f"ranks disagree on the domains: {message}")
            raise RankMismatchError(
                f"ranks disagree on the configuration: {message}",
                rank=bootstrap.rank,
                step="bootstrap",
                peer=peer,
                expected=first.get(name),
                seen=values.get(name),
            )
    return Agreement(generation, said)


def _generation(value: Any) -> int:
    require(type(value) is int and 0 < value < 1 << 64, "no generation")
    return int(value)


def _values(value: Any) -> dict[str, Any]:
    require(isinstance(value, dict), "no values")
    found: dict[str, Any] = value
    return found


def are_set(config: EpConfig) -> bool:
    """Whether the configuration sets the domains; else they are found."""
    return config.network.domains is not None or config.network.domain_size is not None


class Handshake:
    """A rank's part in finding the domains, over shared memory, by the native core. Every rank offers; then
    every rank looks at all offers; then all know the domains. A context manager, which ends when all have
    looked.
    """

    def __init__(self) -> None:
        self._probe: Any = None

    def offer(self) -> bytes:
        self._probe = load_native().DomainProbe(boot_id())
        return bytes(self._probe.offer())

    def reach(self, rank: int, offers: Sequence[bytes]) -> bytes:
        """Whose memory this rank can map. Nothing where it, or another rank, has offered nothing."""
        return bytes(self._probe.reach(rank, offers)) if self._probe and all(offers) else b""

    def __enter__(self) -> Handshake:
        return self

    def __exit__(self, *_: object) -> None:
        # The traceback of an error keeps this object, and a segment lives as long as its probe.
        self._probe = None


def found(rank: int, reached: Sequence[bytes]) -> Topology:
    """The domains by what all ranks reach. Raises `TopologyError` naming two ranks that disagree."""
    return Topology.from_domains(load_native().domains_of(rank, reached))


def boot_id() -> str:
    """The boot id of the running kernel, or the host's name if there is none.

    Raises `ConfigError` if this process can open no file: that must not make it a separate host.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        refused = limits.refusal_of(error, "reading the host's boot id")
        if refused is not None:
            raise refused from error
        return os.uname().nodename


def memory_id() -> str:
    """Equal for processes that can map each other's POSIX shared memory: their kernel and its /dev/shm mount.

    Containers of one host have separate mounts unless they share their IPC namespace.
    """
    try:
        mount = os.stat(limits.SHARED_MEMORY).st_dev
    except OSError:
        mount = 0
    return f"{boot_id()} {mount}"
