"""How ranks exchange a few bytes while a buffer is created. The bootstrap is not used afterwards.

`TorchBootstrap` needs only the key-value store of a torch.distributed group: no collective runs on the group,
so it works for any backend and cannot interleave with the program's own collectives. `LocalBootstrap` serves
ranks that are threads of one process.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from uccl_ep_train.common.uncopied import Uncopied
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import (
    ArrivalTimeout,
    CommunicationError,
    ConfigError,
    PeerDied,
    PeerFailed,
    RankMismatchError,
    TransportError,
)
from uccl_ep_train.group import torch_group
from uccl_ep_train.group.answers import MOST_SHOWN, decode, malformed, require
from uccl_ep_train.group.ends import Ends, Process
from uccl_ep_train.group.patience import Patience
from uccl_ep_train.group.store_tree import Late, StoreTree, forget

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

DEFAULT_TIMEOUT_S = 300.0
_NONCE_BYTES = 16
_PAUSE_S = 0.02

T = TypeVar("T")


@runtime_checkable
class Bootstrap(Protocol):
    """What the creation of a buffer needs. Every rank makes the same calls in the same order.

    rank, size  of this process in the group

    `StoreBootstrap` has further methods, which a creation uses if they exist: `watch` and `leave`, to notice
    ranks that die or give up before the deadline, and `finish`.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's payload, by rank. `what` names the step for errors and must be equal on all ranks.

        Raises `ArrivalTimeout` naming the missing ranks, `RankMismatchError` naming both ranks and both
        steps, `TransportError` when the store cannot be reached.
        """
        ...

    def barrier(self, what: str) -> None:
        """Returns when every rank has called it; raises what `all_gather` raises."""
        ...


class _SteppedBootstrap(Uncopied):
    """all_gather and barrier from two primitives: post this rank's frame of a step, collect all frames."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._step = 0
        self._processes: Sequence[Process] = ()

    def watch(self, processes: Sequence[Process]) -> None:
        """Takes the process of each rank. From now on errors name hosts. `StoreBootstrap` notices processes
        that end, and its leaders are those of hosts.
        """
        self._processes = processes

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        step = self._step
        self._step += 1
        patience = Patience(self._timeout_s)
        name = what.encode() + b"\0"
        self._post(step, name + payload, patience)
        frames = self._collect(step, what, patience)
        for peer, frame in enumerate(frames):
            if not frame.startswith(name):
                raise self._at_another_step(what, peer, frame)
        return [frame[len(name) :] for frame in frames]

    def barrier(self, what: str) -> None:
        self.all_gather(b"", what)

    def _at_another_step(self, what: str, peer: int, frame: bytes) -> RankMismatchError:
        # A frame of a foreign process may be anything, not only text.
        seen = frame.partition(b"\0")[0][:MOST_SHOWN].decode(errors="backslashreplace")
        return RankMismatchError(
            f"creation: rank {self._rank} is at {what!r} while rank {peer} is at {seen!r}",
            rank=self._rank,
            step="bootstrap",
            peer=peer,
            expected=what,
            seen=seen,
        )

    def _timed_out(self, what: str, missing: list[int]) -> ArrivalTimeout:
        look = f"look first at rank {missing[0]} {self._processes[missing[0]]}: " if self._processes else ""
        return ArrivalTimeout(
            f"{look}creation, {what}: rank {self._rank} waited {self._timeout_s:g} s for "
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self._size}",
            rank=self._rank,
            step="bootstrap",
            peer=missing[0],
            expected=self._size,
            seen=self._size - len(missing),
        )

    def _post(self, step: int, frame: bytes, patience: Patience) -> None:
        raise NotImplementedError

    def _collect(self, step: int, what: str, patience: Patience) -> list[bytes]:
        raise NotImplementedError


class StoreBootstrap(_SteppedBootstrap):
    """Over a torch.distributed key-value store that all ranks share.

    A key has `name`, the number of bootstraps that this rank has had under that name, and a random nonce of
    rank 0. So nobody reads frames of an earlier bootstrap, an earlier job or a replaced process. The number
    also lies in the store.

    How frames travel: see `store_tree.py`. A rank that dies or gives up ends the creation for the waiting
    ranks: see `ends.py`. While rank 0 has not come, only the deadline ends it.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, name: str, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        super().__init__(rank, size, timeout_s)
        self._store = store
        self._counts = f"uccl_ep_train/{name}/creations"
        self._count = self._count_of(rank, 1)
        self._joined = False
        self._nonce_key = f"uccl_ep_train/{name}/{self._count}/nonce"
        if rank == 0:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            self._guard(lambda: store.set(self._nonce_key, nonce))  # type: ignore[arg-type]  # takes bytes
            self._join(nonce)

    def watch(self, processes: Sequence[Process]) -> None:
        super().watch(processes)
        if not self._joined:
            return
        hosts = Topology.from_domains([process.host_key for process in processes]).members
        self._tree.arrange(hosts)
        self._ends.watch(processes, next(members for members in hosts if self._rank in members))

    def leave(self, error: BaseException) -> None:
        """Tells the ranks that wait for this one that it will not come."""
        with contextlib.suppress(TransportError):  # Ranks that cannot be told wait for the deadline.
            if self._try_join():
                self._ends.say(error)

    def _join(self, nonce: bytes) -> None:
        self._prefix = f"{self._nonce_key}/{nonce.hex()}"
        self._ends = Ends(self._store, f"{self._prefix}/end", self._rank, self._guard)
        self._tree = StoreTree(self._store, self._prefix, self._rank, self._size, self._guard)
        self._joined = True
        if self._processes:
            self.watch(self._processes)

    def _post(self, step: int, frame: bytes, patience: Patience) -> None:
        while not self._try_join():
            if patience.over():
                what = frame.partition(b"\0")[0].decode()
                raise self._timed_out(what + self._other_counts([0]), [0])
            time.sleep(_PAUSE_S)
        self._tree.post(step, frame)

    def _try_join(self) -> bool:
        """Whether rank 0 has come, so that this rank knows the keys."""
        if not self._joined and self._guard(lambda: self._store.check([self._nonce_key])):
            nonce = bytes(self._guard(lambda: self._store.get(self._nonce_key)))
            if len(nonce) != _NONCE_BYTES:
                raise malformed(self._rank, "nonce", 0, nonce)
            self._join(nonce)
        return self._joined

    def _collect(self, step: int, what: str, patience: Patience) -> list[bytes]:
        try:
            return self._tree.collect(what, patience, lambda complete: self._ends.look(what, complete))
        except TransportError as error:
            if error.peer < 0:
                self._ends.blame_for_store(what, error)
            self.leave(error)
            raise
        except Late as late:
            timeout = self._timed_out(what + self._other_counts(late.ranks), late.ranks)
            self.leave(timeout)
            raise timeout from None
        except BaseException as error:
            self.leave(error)
            raise

    def _count_of(self, rank: int, added: int) -> int:
        return int(self._guard(lambda: self._store.add(f"{self._counts}/{rank}", added)))

    def _other_counts(self, missing: list[int]) -> str:
        """A remedy for ranks that never meet because one of them has bootstrapped here alone before."""
        counts = {peer: self._count_of(peer, 0) for peer in missing}
        others = [f"rank {peer} its {count}." for peer, count in counts.items() if 0 != count != self._count]
        if not others:
            return ""
        return (
            f" (this rank's {self._count}. creation on the group, {', '.join(others)}: not all ranks made "
            "each. Make a new group, on all of them)"
        )

    def finish(self) -> None:
        """Removes what this bootstrap left in the store. Every rank calls it at its end; never raises."""
        if not self._joined:
            return
        try:
            if self._store.add(f"{self._prefix}/finished", 1) < self._size:
                return
        except Exception:  # The store may be gone already.
            return
        self._tree.finish()
        for key in (self._nonce_key, f"{self._prefix}/finished", f"{self._prefix}/end"):
            forget(self._store, key)

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise TransportError(
                f"creation: rank {self._rank} cannot reach the group's store: {error}",
                rank=self._rank,
                step="bootstrap",
            ) from error


class TorchBootstrap(StoreBootstrap):
    """Over the store of a `torch.distributed` process group (None: the default group).

    Raises `DtypeError` for what is no group, and `ConfigError` when torch.distributed is not initialised,
    this process is not in the group, or the group has no store.
    """

    def __init__(self, group: ProcessGroup | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        group, rank = torch_group.joined(group)
        super().__init__(
            torch_group.store_of(group),
            rank,
            group.size(),
            name=getattr(group, "group_name", "default"),
            timeout_s=timeout_s,
        )


class _LocalRoom:
    """What the threads of a `LocalBootstrap` share: frames by step, then by rank."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.frames: dict[int, list[bytes | None]] = {}
        self.readers_left: dict[int, int] = {}
        self.writers_left: dict[int, int] = {}
        self.size = size


class LocalBootstrap(_SteppedBootstrap):
    """For ranks that are threads of one process: `LocalBootstrap.create(n)` gives one per rank."""

    instead = "ranks that are threads of its process"

    def __init__(self, room: _LocalRoom, rank: int, timeout_s: float) -> None:
        super().__init__(rank, room.size, timeout_s)
        self._room = room

    @classmethod
    def create(cls, size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[LocalBootstrap]:
        if size < 1:
            raise ConfigError(f"size = {size}: allowed is at least 1")
        room = _LocalRoom(size)
        return [cls(room, rank, timeout_s) for rank in range(size)]

    def _post(self, step: int, frame: bytes, patience: Patience) -> None:
        room = self._room
        with room.changed:
            room.frames.setdefault(step, [None] * room.size)[self._rank] = frame
            room.readers_left.setdefault(step, room.size)
            room.writers_left[step] = room.writers_left.get(step, room.size) - 1
            if room.writers_left[step] == 0:  # not each time: all ranks would wake for each
                room.changed.notify_all()

    def _collect(self, step: int, what: str, patience: Patience) -> list[bytes]:
        room = self._room
        with room.changed:
            frames = room.frames[step]
            patience.wait_for(room.changed, lambda: room.writers_left[step] == 0)
            missing = [peer for peer, frame in enumerate(frames) if frame is None]
            if missing:
                raise self._timed_out(what, missing)
            room.readers_left[step] -= 1
            if room.readers_left[step] == 0:
                del room.frames[step], room.readers_left[step], room.writers_left[step]
            return [frame for frame in frames if frame is not None]


def give_up(bootstrap: Bootstrap, error: BaseException) -> None:
    """Tells the ranks that wait for this one that it will not come, if the bootstrap can."""
    leave = getattr(bootstrap, "leave", None)
    if leave is not None:
        leave(error)


def exchange(bootstrap: Bootstrap, what: str, produce: Callable[[], bytes]) -> list[bytes]:
    """Runs `produce` on each rank and gathers the results; if it fails on one, all ranks raise at once.

    The failed rank raises its own exception, the others `PeerFailed` with the rank and its error. All
    fallible steps of a buffer's creation use this function, so no rank waits for one that has given up.
    """
    failure: Exception | None = None
    payload = b""
    try:
        payload = b"+" + produce()
    except Exception as error:
        failure = error
        payload = b"-" + json.dumps([type(error).__name__, str(error)]).encode()
    except BaseException as error:  # Ctrl-C: this rank stops waiting
        give_up(bootstrap, error)
        raise
    try:
        answers = bootstrap.all_gather(payload, what)
        if failure is not None:
            raise failure
    except CommunicationError as error:
        # What a rank takes along when it ends is missed here, which is not the cause.
        left = isinstance(error, (PeerDied, PeerFailed)) and isinstance(failure, CommunicationError)
        if failure is None or left:
            raise
        raise failure from None
    finally:
        # An exception that its own traceback leads back to would keep all that its frames hold, memory of an
        # engine among it, until the next garbage collection.
        failure = None
    for peer, answer in enumerate(answers):
        if answer[:1] == b"-":
            name, message = decode(bootstrap.rank, what, peer, answer[1:], _failure)
            raise PeerFailed(
                f"creation, {what}: rank {peer} failed with {name}: {message}",
                rank=bootstrap.rank,
                step="bootstrap",
                peer=peer,
                expected="ok",
                seen=name,
            )
        if answer[:1] != b"+":
            raise malformed(bootstrap.rank, what, peer, answer)
    return [answer[1:] for answer in answers]


def _failure(value: Any) -> tuple[str, str]:
    require(
        isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value),
        "no error's class and message",
    )
    return value[0], value[1]
