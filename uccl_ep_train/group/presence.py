"""Where a rank runs, and whether its process is still alive."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

from uccl_ep_train.group import transport
from uccl_ep_train.group.answers import decode_all, require, split
from uccl_ep_train.group.bootstrap import Bootstrap, exchange
from uccl_ep_train.group.domains import boot_id

_PROC = Path("/proc")


@dataclass(frozen=True)
class Presence:
    """Where a rank runs, as it reports; `pid` is valid in `pid_space`."""

    place: transport.Place
    pid: int
    pid_space: str

    @classmethod
    def here(cls) -> Presence:
        return cls(transport.Place.here(), os.getpid(), _pid_space())

    @property
    def host(self) -> str:
        return self.place.host

    @property
    def host_key(self) -> str:
        return f"{self.place.memory} {self.pid_space}"

    def has_ended(self) -> bool:
        """Whether its process is known to be gone; only known within its pid namespace."""
        return self._state() in ("", "Z", "X")

    def has_stopped(self) -> bool:
        return self._state() in ("T", "t")

    def __str__(self) -> str:
        return f"on {self.place.host} (pid {self.pid})"

    def _state(self) -> str:
        """The state letter of proc(5); "": no such process; "?": not known."""
        if self.pid_space != _pid_space():
            return "?"
        try:
            # The state follows the name, which is in parentheses and may hold any character.
            return (_PROC / str(self.pid) / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except (OSError, IndexError):
            return "?"


class Presences(Sequence[Presence]):
    """By rank. It makes each when asked: a large group has many, and they would be collected as garbage."""

    def __init__(self, spots: Sequence[tuple[transport.Place, str]], pids: Sequence[int]) -> None:
        """spots: each rank's place and pid space; ranks of a host share one"""
        self._spots = spots
        self._pids = pids

    @property
    def places(self) -> list[transport.Place]:
        return [place for place, _ in self._spots]

    def __len__(self) -> int:
        return len(self._pids)

    @overload
    def __getitem__(self, rank: int) -> Presence: ...
    @overload
    def __getitem__(self, rank: slice) -> Presences: ...
    def __getitem__(self, rank: int | slice) -> Presence | Presences:
        if isinstance(rank, slice):
            return Presences(self._spots[rank], self._pids[rank])
        place, pid_space = self._spots[rank]
        return Presence(place, self._pids[rank], pid_space)


class Met(NamedTuple):
    """By rank: where each runs, and what it said besides."""

    ranks: Presences
    besides: list[bytes]


def meet(bootstrap: Bootstrap, besides: Callable[[], bytes] = bytes) -> Met:
    """Collective; the first step of a creation. Afterwards a bootstrap with `watch` notices processes that
    end. besides: gives bytes of any meaning; may raise
    """
    what, rank = "processes", bootstrap.rank

    def mine() -> bytes:
        here = Presence.here()
        place = [here.place.host, here.place.memory, here.pid_space]
        return f"{here.pid}\0{json.dumps(place)}\0".encode() + besides()

    # What ranks of a host have in common is apart from what they have not.
    pids, spots, more = split(rank, what, exchange(bootstrap, what, mine))
    ranks = Presences(decode_all(rank, what, spots, _spot), decode_all(rank, what, pids, _pid))
    watch = getattr(bootstrap, "watch", None)
    if watch is not None:
        watch(ranks)
    return Met(ranks, more)


def _pid(value: Any) -> int:
    require(type(value) is int, "no pid")
    return int(value)


def _spot(value: Any) -> tuple[transport.Place, str]:
    """A place and a pid space."""
    require(isinstance(value, list) and [type(part) for part in value] == [str, str, str], "no place")
    host, memory, pid_space = value
    return transport.Place(host, memory), pid_space


def _pid_space() -> str:
    """Equal for processes of one pid namespace that see each other in /proc."""
    return _pid_space_of(os.getpid())


@functools.cache
def _pid_space_of(pid: int) -> str:
    """pid: this process's, which a fork changes"""
    try:
        # The /proc of another namespace shows other processes under the same pids.
        foreign = os.readlink(_PROC / "self") != str(pid)
        own = f"{boot_id()} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return f"{boot_id()} unknown to {pid}"
    return f"{own} unseen by {pid}" if foreign else own
