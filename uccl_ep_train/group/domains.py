"""Which ranks form a domain: probed and verified, or set, and in any case the same on every rank.

A domain is a set of ranks that can map each other's memory. On the host backend that is POSIX shared memory:
two ranks share a domain if they report the same boot id *and* each opened the other's segment and read its
nonce there. Containers of one host may fail the second, clones of one machine image the first.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from uccl_ep_train.common import limits
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import RankMismatchError, TopologyError
from uccl_ep_train.group import leftovers
from uccl_ep_train.group.answers import Decoded, decode, require
from uccl_ep_train.group.bootstrap import Bootstrap, exchange
from uccl_ep_train.settings.config import EpConfig

NONCE_BYTES = 32
_SEGMENT_PREFIX = "/uccl_ep_probe_"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Agreement(NamedTuple):
    """A 64-bit key, random, nonzero and rank 0's choice: no flag of an engine can be mistaken for one of an
    earlier engine. And what the ranks said, by rank.
    """

    generation: int
    said: list[Any]


def agree_on_config(
    bootstrap: Bootstrap, config: EpConfig, verify: Callable[[], Any], shape: Callable[[Any], Any]
) -> Agreement:
    """Ranks compare the settings that must be equal, take a common generation key, and say what `verify`
    returned: anything that JSON can carry and `shape` takes (as `answers.decode`).

    Raises `TopologyError` when ranks set different domains and `RankMismatchError` for any other setting;
    both name two ranks and their values, and every rank raises the same.
    """

    def mine() -> bytes:
        said = verify()
        return json.dumps(
            {"generation": secrets.randbits(64) or 1, "values": config.agreed_values(), "said": said}
        ).encode()

    def settings(value: Any) -> tuple[int, dict[str, Any], Any]:
        generation, values, said = _settings(value)
        return generation, values, shape(said)

    answers = _gather(bootstrap, "configuration", mine, settings)
    first = answers[0][1]
    for peer, (_, values, _) in enumerate(answers):
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
    return Agreement(answers[0][0], [said for _, _, said in answers])


def _gather(
    bootstrap: Bootstrap, what: str, produce: Callable[[], bytes], shape: Callable[[Any], Decoded]
) -> list[Decoded]:
    answers = exchange(bootstrap, what, produce)
    return [decode(bootstrap.rank, what, peer, answer, shape) for peer, answer in enumerate(answers)]


def _settings(value: Any) -> tuple[int, dict[str, Any], Any]:
    require(isinstance(value, dict) and "said" in value, "no settings")
    generation, values = value.get("generation"), value.get("values")
    require(type(generation) is int and 0 < generation < 1 << 64, "no generation")
    require(isinstance(values, dict), "no values")
    return generation, values, value["said"]


def _offer(value: Any) -> tuple[str, str, bytes]:
    require(isinstance(value, list) and [type(part) for part in value] == [str, str, str], "no offer")
    boot, name, nonce = value
    require(name.startswith(_SEGMENT_PREFIX) and "\0" not in name, "no segment of ours")
    return boot, name, bytes.fromhex(nonce)


def _reach(num_ranks: int) -> Callable[[Any], frozenset[int]]:
    def shape(value: Any) -> frozenset[int]:
        require(
            isinstance(value, list) and all(type(rank) is int and 0 <= rank < num_ranks for rank in value),
            "no ranks of the group",
        )
        return frozenset(value)

    return shape


def resolve_topology(bootstrap: Bootstrap, config: EpConfig) -> Topology:
    """The group's domains, set or probed; collective. Raises `TopologyError`, `ConfigError`."""
    return Topology.from_config(config, bootstrap.size) or probe(bootstrap)


def probe(bootstrap: Bootstrap) -> Topology:
    """Finds the domains by a handshake over shared memory; collective.

    Raises `TopologyError` naming two ranks that disagree on sharing a domain.
    """
    segment: list[Segment] = []
    try:

        def offer() -> bytes:
            segment.append(Segment.create())
            return json.dumps([boot_id(), segment[0].name, segment[0].nonce.hex()]).encode()

        offers = _gather(bootstrap, "topology: offer", offer, _offer)

        def reach() -> bytes:
            mine = offers[bootstrap.rank][0]
            reached = [
                rank
                for rank, (boot, name, nonce) in enumerate(offers)
                if rank == bootstrap.rank or (boot == mine and readable(name, nonce))
            ]
            return json.dumps(reached).encode()

        # Nobody unlinks before everybody has looked: a rank leaves this exchange only when all have entered
        # it.
        reached = _gather(bootstrap, "topology: reach", reach, _reach(bootstrap.size))
    finally:
        for entry in segment:
            entry.unlink()
    return domains_of_reach(reached)


def domains_of_reach(reached: Sequence[frozenset[int]]) -> Topology:
    """The domains, from the set of ranks that each rank could open (itself among them).

    Ranks of a domain must see the same set; otherwise `TopologyError`.
    """
    for rank, ranks in enumerate(reached):
        if rank not in ranks:
            raise TopologyError(
                f"rank {rank} does not reach its own memory, only that of {sorted(ranks)}; "
                "set domains or domain_size"
            )
        for peer in sorted(ranks):
            if reached[peer] != ranks:
                raise TopologyError(
                    f"ranks disagree on their domain: rank {rank} reaches the memory of {sorted(ranks)}, "
                    f"rank {peer} that of {sorted(reached[peer])}; set domains or domain_size"
                )
    return Topology.from_domains([min(ranks) for ranks in reached])


def boot_id() -> str:
    """Identifies the running kernel. Where there is none the host's name has to do.

    Raises `ConfigError` where this process can open no file: who cannot look is no stranger.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        refused = limits.refusal_of(error, "reading the host's boot id")
        if refused is not None:
            raise refused from error
        return os.uname().nodename


def memory_id() -> str:
    """Equal for processes that can map each other's POSIX shared memory: their kernel, and its mount of it.

    Containers of one host have mounts of their own unless they share their IPC namespace.
    """
    try:
        mount = os.stat(limits.SHARED_MEMORY).st_dev
    except OSError:
        mount = 0
    return f"{boot_id()} {mount}"


@dataclass
class Segment:
    """A randomly named shared-memory segment holding a nonce, locked as `leftovers` wants it."""

    name: str
    nonce: bytes
    descriptor: int

    @classmethod
    def create(cls) -> Segment:
        """Raises `ConfigError` where the host has too little of something, `TopologyError`."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        while True:
            name = f"{_SEGMENT_PREFIX}{os.getpid()}.{secrets.token_hex(12)}"
            text = f"cannot create shared memory {name}"
            try:
                descriptor = _shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
            except OSError as error:
                raise limits.refusal_of(error, text) or TopologyError(f"{text}: {error}") from error
            segment = cls(name, nonce, descriptor)
            try:
                if leftovers.lock(descriptor):
                    os.posix_fallocate(descriptor, 0, NONCE_BYTES)
                    os.write(descriptor, nonce)
                    return segment
            except OSError as error:
                segment.unlink()
                refused = limits.refusal_of(error, text, NONCE_BYTES)
                raise refused or TopologyError(f"{text}: {error}") from error
            segment.unlink()  # somebody who sweeps has taken it for one that was left behind

    def unlink(self) -> None:
        import _posixshmem

        with contextlib.suppress(OSError):  # gone already: nothing is leaked
            _posixshmem.shm_unlink(self.name)
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def readable(name: str, nonce: bytes) -> bool:
    """Whether this process opens the segment, maps it and finds the nonce.

    Raises `ConfigError` where it cannot try: that says nothing of whom it reaches.
    """
    try:
        descriptor = _shm_open(name, os.O_RDWR)
    except OSError as error:
        return _not_reached(name, error)
    try:
        with mmap.mmap(descriptor, NONCE_BYTES) as view:
            return view[:] == nonce
    except OSError as error:
        return _not_reached(name, error)
    except ValueError:
        return False
    finally:
        os.close(descriptor)


def _not_reached(name: str, error: OSError) -> bool:
    refused = limits.refusal_of(error, f"cannot try to open shared memory {name}")
    if refused is not None:
        raise refused from error
    return False


def _shm_open(name: str, flags: int) -> int:
    # The standard library's own binding of shm_open; `multiprocessing.shared_memory` would start a tracker
    # process that unlinks segments of other ranks when one rank exits.
    import _posixshmem

    return _posixshmem.shm_open(name, flags, mode=0o600)
