"""How frames of all ranks reach all ranks through a key-value store, with few requests and small waits.

In each step every rank posts its frame. The first rank of each section, its leader, posts a bundle of the
section's frames. Rank 0 posts all frames as one value, which every rank reads. So a step takes O(1) requests
of a rank, and as many keys in a leader's as its section has ranks, in rank 0's as there are sections.
"""

from __future__ import annotations

import math
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from uccl_ep_train.errors import RankMismatchError
from uccl_ep_train.group.answers import malformed
from uccl_ep_train.group.ends import LOOK_S

if TYPE_CHECKING:
    from torch.distributed import Store

    from uccl_ep_train.group.patience import Patience

ROOT = 0
TOKEN_BYTES = 16
_FIRST_PAUSE_S = 0.0005
_LEAST_MOST_PAUSE_S = 0.02
_PAUSE_OF_A_RANK_S = 0.0002
"""Bounds what waiting ranks ask of the store: together 5,000 requests a second, in groups of 100 or more."""

T = TypeVar("T")


def pack(frames: Sequence[bytes]) -> bytes:
    """Number of frames, their sizes (8 bytes each, little endian), the frames."""
    sizes = struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames))
    return b"".join((sizes, *frames))


def unpack(packed: bytes, number: int) -> list[bytes]:
    """Raises `ValueError` where `packed` does not hold so many frames and nothing else."""
    begin = 8 * (1 + number)
    if len(packed) < begin:
        raise ValueError(f"{len(packed)} bytes hold no sizes of {number} frames")
    count, *sizes = struct.unpack_from(f"<{1 + number}Q", packed)
    if count != number or begin + sum(sizes) != len(packed):
        raise ValueError(f"{len(packed)} bytes do not hold {number} frames")
    frames = []
    for size in sizes:
        frames.append(packed[begin : begin + size])
        begin += size
    return frames


def consecutive(size: int) -> list[range]:
    """Sections of neighbouring ranks, about as many as each has ranks."""
    length = math.isqrt(size - 1) + 1
    return [range(first, min(first + length, size)) for first in range(0, size, length)]


class Late(Exception):
    """The deadline of a step is over. ranks: that have not done their part"""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class StoreTree:
    """The steps of one creation on one rank.

    prefix  of the keys, used by no other creation
    guard   calls a function of the store; raises `TransportError`
    """

    def __init__(
        self, store: Store, prefix: str, rank: int, size: int, guard: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._guard = guard
        self._step = -1
        self._complete = True
        self._mine = b""
        # What an earlier job left under the same keys cannot hold it.
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self.arrange(consecutive(size))

    def arrange(self, sections: Sequence[Sequence[int]]) -> None:
        """Ascending ranks, each in one section; rank 0 in the first. The same on all ranks, between steps."""
        self._sections = sections
        own = next(section for section in sections if self._rank in section)
        self._members = own if own[0] == self._rank else ()

    def post(self, step: int, frame: bytes) -> None:
        self._step, self._complete = step, False
        self._mine = self._token + frame
        self._set(self._frame_key(self._rank), self._mine)

    def collect(
        self, what: str, patience: Patience, look: Callable[[Callable[[], bool]], None]
    ) -> list[bytes]:
        """The frames of all ranks, by rank.

        look  is called a few times a second with a function that says whether what we wait for is there

        Raises `Late`, `TransportError` for what no rank of this version posts, `RankMismatchError` for frames
        of another creation, and what `look` raises.
        """
        wait = Wait(self, patience, look)
        if self._members:
            bundle = self._gathered(what, wait)
        if self._rank == ROOT:
            packed = pack(self._joined(what, bundle, wait))
            self._set(self._all_key(self._step), packed)
        else:
            wait.until([self._all_key(self._step)])
            packed = self._read([self._all_key(self._step)])[0]
        frames = self._unpacked(what, ROOT, packed, self._size)
        self._complete = True
        self._forget_own()
        if frames[self._rank] != self._mine:
            raise RankMismatchError(
                f"creation, {what}: rank {self._rank} has no part in the creation that the store shows it: "
                "one that is over, or one that another process makes as this rank",
                rank=self._rank,
                step="bootstrap",
                peer=ROOT,
                expected=self._token.hex(),
                seen=frames[self._rank][:TOKEN_BYTES].hex(),
            )
        for peer, frame in enumerate(frames):
            if len(frame) < TOKEN_BYTES:
                raise malformed(self._rank, what, peer, frame)
        return [frame[TOKEN_BYTES:] for frame in frames]

    def finish(self) -> None:
        """Removes what the last step left. One rank calls it, when all have ended."""
        if self._step < 0:
            return
        forget(self._store, self._all_key(self._step))
        if not self._complete:
            for rank in range(self._size):
                forget(self._store, self._frame_key(rank))
            for section in self._sections:
                forget(self._store, self._bundle_key(section[0]))

    # ------------------------------------------------------------------------------ parts of a step

    def _gathered(self, what: str, wait: Wait) -> bytes:
        """A leader's bundle. That of rank 0 stays here."""
        keys = [self._frame_key(rank) for rank in self._members if rank != self._rank]
        wait.until(keys)
        frames = dict(zip(keys, self._read(keys), strict=True)) | {self._frame_key(self._rank): self._mine}
        bundle = pack([frames[self._frame_key(rank)] for rank in self._members])
        if self._rank != ROOT:
            self._set(self._bundle_key(self._rank), bundle)
        return bundle

    def _joined(self, what: str, own: bytes, wait: Wait) -> list[bytes]:
        """Rank 0: the frames of all, by rank."""
        others = [self._bundle_key(section[0]) for section in self._sections if section[0] != ROOT]
        wait.until(others)
        if self._step > 0:
            # All ranks have posted this step, so they have read all of the previous one.
            forget(self._store, self._all_key(self._step - 1))
        frames = [b""] * self._size
        for section, bundle in zip(self._sections, [own, *self._read(others)], strict=True):
            for rank, frame in zip(
                section, self._unpacked(what, section[0], bundle, len(section)), strict=True
            ):
                frames[rank] = frame
        return frames

    def _unpacked(self, what: str, peer: int, packed: bytes, number: int) -> list[bytes]:
        try:
            return unpack(packed, number)
        except ValueError as error:
            raise malformed(self._rank, what, peer, packed) from error

    def _forget_own(self) -> None:
        forget(self._store, self._frame_key(self._rank))
        if self._members and self._rank != ROOT:
            forget(self._store, self._bundle_key(self._rank))

    def late_ranks(self) -> list[int]:
        """Who has not done its part of the step: has posted no frame; else no bundle; else rank 0."""
        frames = self._missing([(rank, self._frame_key(rank)) for rank in range(self._size)])
        others = [(section[0], self._bundle_key(section[0])) for section in self._sections[1:]]
        return frames or self._missing(others) or [ROOT]

    def _missing(self, keys: list[tuple[int, str]]) -> list[int]:
        """The ranks whose keys are not there, by bisection: most are."""
        if not keys or self.has([key for _, key in keys]):
            return []
        if len(keys) == 1:
            return [keys[0][0]]
        half = len(keys) // 2
        return self._missing(keys[:half]) + self._missing(keys[half:])

    # ------------------------------------------------------------------------------ the store

    def has(self, keys: list[str]) -> bool:
        return bool(self._guard(lambda: self._store.check(keys)))

    def most_pause_s(self) -> float:
        return max(_LEAST_MOST_PAUSE_S, self._size * _PAUSE_OF_A_RANK_S)

    def _set(self, key: str, value: bytes) -> None:
        # Takes bytes, although torch declares str.
        self._guard(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def _read(self, keys: list[str]) -> list[bytes]:
        """In one request where the store can: a request for each key takes 16 times as long."""

        def read() -> list[bytes]:
            if len(keys) > 1 and self._store.has_extended_api():  # type: ignore[attr-defined]
                return [bytes(value) for value in self._store.multi_get(keys)]
            return [bytes(self._store.get(key)) for key in keys]

        found: list[bytes] = self._guard(read)
        return found

    def _frame_key(self, rank: int) -> str:
        return f"{self._prefix}/{self._step}/frame/{rank}"

    def _bundle_key(self, leader: int) -> str:
        return f"{self._prefix}/{self._step}/bundle/{leader}"

    def _all_key(self, step: int) -> str:
        return f"{self._prefix}/{step}/all"


class Wait:
    """The waits of a rank in one step, which have one deadline.

    They call `check` in a loop, not `wait`: a waiting client holds the only connection and a lock that other
    threads of the program need. Torch also logs two warnings for each `wait` that times out. After each pause
    the loop checks again, so a rank is at most one pause late.
    """

    def __init__(
        self, tree: StoreTree, patience: Patience, look: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._tree = tree
        self._patience = patience
        self._look = look
        self._next_look = time.monotonic() + LOOK_S

    def until(self, keys: list[str]) -> None:
        """All keys are there. Raises `Late`, and what `look` raises."""
        pause_s = _FIRST_PAUSE_S
        while keys and not self._tree.has(keys):
            if time.monotonic() > self._next_look:
                self._next_look = time.monotonic() + LOOK_S
                self._look(lambda: self._tree.has(keys))
            if self._patience.over():
                late = self._tree.late_ranks()
                if not self._tree.has(keys):
                    raise Late(late)
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self._tree.most_pause_s())


def forget(store: Store, key: str) -> None:
    try:
        store.delete_key(key)
    except Exception:  # Some stores cannot delete keys; the few bytes left are harmless.
        return
