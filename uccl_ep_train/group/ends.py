"""How ranks that wait in the creation of a buffer learn that another rank has died or given up.

Ranks that share the pid namespace of a process see its end and tell the others through the store. A rank that
gives up does the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from uccl_ep_train.errors import ArrivalTimeout, CommunicationError, PeerDied, PeerFailed

LOOK_S = 0.25
"""Between looks at who has left."""
_STORE_GRACE_S = 1.0
"""A process that dies is seen to be gone so long, at most, after the store that it served."""


class Process(Protocol):
    """The process of a rank; its str() says where it runs."""

    @property
    def host(self) -> str: ...

    @property
    def host_key(self) -> str:
        """Equal for processes that share a host's memory and see each other's end."""
        ...

    def has_ended(self) -> bool: ...


def where_to_look(process: Process) -> str:
    """Checks by which the end of a process is detected."""
    return f"see its log, and dmesg on {process.host} (the out-of-memory killer)"


class Ends:
    """The view of one creation on one rank.

    key    in the store, under which the first rank that leaves writes its reason
    guard  calls a function of the store; raises `TransportError`
    """

    def __init__(self, store: Any, key: str, rank: int, guard: Callable[[Callable[[], Any]], Any]) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._guard = guard
        self._processes: Sequence[Process] = ()
        self._neighbours: Sequence[int] = ()
        self._watched: Sequence[int] = ()

    def watch(self, processes: Sequence[Process], host: Sequence[int]) -> None:
        """processes: by rank. host: the ranks of this rank's. Its first, the leader, looks at the others, and
        they look at the leader.
        """
        self._processes = processes
        # Threads of this process end with it.
        self._neighbours = [rank for rank in host if processes[rank] != processes[self._rank]]
        leader = host[0]
        self._watched = [rank for rank in self._neighbours if leader in (rank, self._rank)]

    def look(self, what: str, complete: Callable[[], bool]) -> None:
        """Raises the reason why another rank left, unless the step is complete: a rank may leave after its
        last step.
        """
        dead = self._dead(self._watched)
        said = bool(self._guard(lambda: self._store.check([self._key])))
        if (dead < 0 and not said) or complete():
            return
        if said:
            raise self._end(what, bytes(self._guard(lambda: self._store.get(self._key))))
        raise self._died(what, dead)

    def blame_for_store(self, what: str, error: Exception) -> None:
        """The store is gone. Raises `PeerDied` if a rank of this host has died, since it may have served the
        store.
        """
        until = time.monotonic() + _STORE_GRACE_S
        while self._neighbours and time.monotonic() < until:
            if (dead := self._dead(self._neighbours)) >= 0:
                raise self._died(what, dead) from error
            time.sleep(0.02)

    def say(self, error: BaseException) -> None:
        """Tells waiting ranks why this rank leaves; the first rank that leaves is the cause."""
        peer = error.peer if isinstance(error, CommunicationError) else -1
        said = json.dumps([type(error).__name__, str(error), self._rank, peer])
        try:
            if not self._store.check([self._key]):
                self._store.set(self._key, said)
        except Exception:  # Ranks that cannot be told wait for the deadline.
            return

    def _dead(self, ranks: Sequence[int]) -> int:
        """A rank whose process has ended; -1: none known."""
        return next((rank for rank in ranks if self._processes[rank].has_ended()), -1)

    def _died(self, what: str, peer: int) -> PeerDied:
        process = self._processes[peer]
        return PeerDied(
            f"creation, {what}: rank {peer} {process} died; {where_to_look(process)}",
            rank=self._rank,
            step="bootstrap",
            peer=peer,
        )

    def _end(self, what: str, said: bytes) -> CommunicationError:
        try:
            name, text, finder, peer = json.loads(said)
        except (ValueError, TypeError):
            name, text, finder, peer = "an error", repr(said[:80]), -1, -1
        same = {cls.__name__: cls for cls in (PeerDied, ArrivalTimeout)}.get(name)
        if same is not None:
            return same(text, rank=finder, step="bootstrap", peer=peer)
        return PeerFailed(
            f"creation, {what}: rank {finder} gave up by {name}: {text}",
            rank=self._rank,
            step="bootstrap",
            peer=finder,
            expected="ok",
            seen=name,
        )
