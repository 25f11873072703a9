"""Ranks as real processes that can be killed, frozen and thawed.

    def target(rank: Rank, num_steps: int) -> str:       # at module level: it is pickled by name
        with Buffer(rank.group, EpConfig(...)) as buffer:
            rank.mark("created")                          # the parent may wait for it
            rank.wait_for("go")                           # ... and this rank for the parent
            ...
        return "done"

    with ProcessRanks(4, target, (3,)) as ranks:
        ranks.wait_mark("created")
        ranks.kill(1)
        ranks.tell("go")
        outcomes = ranks.outcomes(timeout_s=30)           # by rank

Every rank is a member of a torch.distributed gloo group. Its store lives in the parent, so that killing any
rank, rank 0 included, leaves it alive. No child outlives the `with` block, or the parent.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 60.0
EXIT_GRACE_S = 5.0
STORE_TIMEOUT = datetime.timedelta(seconds=60)
# torch's optimizers import torch._dynamo when the first one is made: more than a second for each rank.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "uccl_ep_train", "uccl_ep_train.api.buffer"]


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: returned (`error` empty), raised, or ended without a word (`error` "Died").

    error    the exception's class name;  message, fields  its text and its `fields()` if it has them
    trace    of the exception
    at       time.monotonic() of the end, which is one clock for all processes of a host
    signal   that ended the process, 0 if none did
    """

    rank: int
    value: Any = None
    error: str = ""
    message: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    trace: str = ""
    at: float = 0.0
    signal: int = 0


class Rank:
    """What a target gets: its rank, its group, and two ways to keep step with the parent."""

    def __init__(self, rank: int, num_ranks: int, pipe: Connection) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.group: Any = None
        self._pipe = pipe

    def mark(self, name: str, value: Any = None) -> None:
        """Tells the parent that this rank has got so far; `value` must be picklable."""
        self._pipe.send(("mark", name, value, time.monotonic()))

    def wait_for(self, name: str, timeout_s: float = START_TIMEOUT_S) -> Any:
        """Returns the value of the parent's `tell(name)`; TimeoutError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while self._pipe.poll(max(0.0, deadline - time.monotonic())):
            told, value = self._pipe.recv()
            if told == name:
                return value
        raise TimeoutError(f"rank {self.rank} waited {timeout_s:g} s for {name!r}")


def _child(
    rank: int,
    num_ranks: int,
    pipe: Connection,
    target: Callable[..., Any],
    args: Any,
    environment: dict[str, str],
) -> None:
    _die_with_parent()
    # As in a program started from a shell; what runs in the background ignores it from the start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The server that it was forked from has the environment of the first test that used one.
    os.environ.clear()
    os.environ.update(environment)
    # gloo looks for an address by the host's name, which not every machine resolves.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    this = Rank(rank, num_ranks, pipe)
    try:
        store = dist.TCPStore("127.0.0.1", this.wait_for("port"), is_master=False, timeout=STORE_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=STORE_TIMEOUT)
        this.group = dist.group.WORLD
        value = target(this, *args)
        pipe.send(("returned", value, time.monotonic()))
    except BaseException as error:
        fields = error.fields() if hasattr(error, "fields") else {}
        report = (type(error).__name__, str(error), fields, traceback.format_exc())
        pipe.send(("raised", report, time.monotonic()))
    # Without the interpreter's clean-up: gloo would wait there for ranks that have been killed.
    pipe.close()
    os._exit(0)


def _die_with_parent() -> None:
    """A killed test run must leave no ranks behind."""
    parent = os.getppid()
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class ProcessRanks:
    """Starts `target(Rank, *args)` in num_ranks processes. A context manager that kills what still runs.

    A process is forked from a server that has imported torch and this package but started no thread and
    opened no engine, which saves seconds a rank against a fresh interpreter and is as clean. With
    method="fork" it is forked from this process, which then must be as clean: no second import of torch, and
    args need not be picklable.
    """

    def __init__(
        self,
        num_ranks: int,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        method: str = "forkserver",
    ) -> None:
        import torch.distributed as dist

        self.num_ranks = num_ranks
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self._outcomes: dict[int, Outcome] = {}
        self._marks: dict[tuple[int, str], tuple[Any, float]] = {}
        self._frozen: set[int] = set()
        self._pipes: dict[int, Connection] = {}
        self._processes: list[Any] = []
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_child,
                    args=(rank, num_ranks, theirs, target, args, dict(os.environ)),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes[rank] = ours
            # Not before: the store has a thread, whose locks a forked process would find taken for ever.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.tell("port", self._store.port)
        except BaseException:
            self.close()
            raise

    # What a test does to ranks

    def kill(self, rank: int) -> float:
        """SIGKILL; returns once the process is gone, with the time of the signal (time.monotonic())."""
        at = time.monotonic()
        self._processes[rank].kill()
        self._processes[rank].join(EXIT_GRACE_S)
        assert not self._processes[rank].is_alive(), f"rank {rank} survived SIGKILL"
        return at

    def freeze(self, rank: int) -> float:
        """SIGSTOP; returns when all its threads stand still, with the time of the signal."""
        at = time.monotonic()
        pid = self._processes[rank].pid
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(rank)
        deadline = at + EXIT_GRACE_S
        while not _is_stopped(pid):
            assert time.monotonic() < deadline, f"rank {rank} does not stop"
            time.sleep(0.001)
        return at

    def thaw(self, rank: int) -> None:
        """SIGCONT."""
        os.kill(self._processes[rank].pid, signal.SIGCONT)
        self._frozen.discard(rank)

    def interrupt(self, rank: int) -> None:
        """SIGINT, as by Ctrl-C."""
        os.kill(self._processes[rank].pid, signal.SIGINT)

    def tell(self, name: str, value: Any = None, ranks: Iterable[int] | None = None) -> None:
        """Lets `wait_for(name)` of the ranks (all that still run) return the value."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            if rank in self._pipes:
                try:
                    self._pipes[rank].send((name, value))
                except OSError:
                    continue  # It has ended; its outcome says how.

    # What a test learns from them

    def wait_mark(
        self, name: str, ranks: Iterable[int] | None = None, timeout_s: float = START_TIMEOUT_S
    ) -> list[Any]:
        """The values that the ranks (all) gave to `mark(name)`. AssertionError if one ends or is late."""
        wanted = list(range(self.num_ranks) if ranks is None else ranks)
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in wanted if (rank, name) not in self._marks]:
            ended = [self._outcomes[rank] for rank in missing if rank in self._outcomes]
            assert not ended, f"ended before {name!r}: {ended}"
            if not self._receive(deadline):
                raise AssertionError(f"ranks {missing} did not reach {name!r} within {timeout_s:g} s")
        return [self._marks[rank, name][0] for rank in wanted]

    def mark_time(self, rank: int, name: str) -> float:
        """time.monotonic() of the rank's latest `mark(name)`."""
        return self._marks[rank, name][1]

    def outcomes(
        self, timeout_s: float = START_TIMEOUT_S, ranks: Iterable[int] | None = None
    ) -> dict[int, Outcome]:
        """How the ranks (all not frozen) ended. AssertionError naming those that did not in time."""
        wanted = set(range(self.num_ranks)) - self._frozen if ranks is None else set(ranks)
        deadline = time.monotonic() + timeout_s
        while missing := wanted - self._outcomes.keys():
            if not self._receive(deadline):
                raise AssertionError(
                    f"ranks {sorted(missing)} still run after {timeout_s:g} s; ended: {self._outcomes}"
                )
        return {rank: self._outcomes[rank] for rank in sorted(wanted)}

    def results(self, timeout_s: float = START_TIMEOUT_S) -> list[Any]:
        """What each rank returned; AssertionError with the traces if one did not return."""
        outcomes = self.outcomes(timeout_s, range(self.num_ranks))
        failed = [outcome for outcome in outcomes.values() if outcome.error]
        assert not failed, "\n".join(f"rank {entry.rank}: {entry.error}\n{entry.trace}" for entry in failed)
        return [outcomes[rank].value for rank in range(self.num_ranks)]

    def _receive(self, deadline: float) -> bool:
        """Takes in what has arrived, waiting for the first of it; False if nothing came in time."""
        pipes = {pipe: rank for rank, pipe in self._pipes.items() if rank not in self._outcomes}
        ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                self._take(rank, pipe.recv())
            except (EOFError, OSError):
                self._outcomes[rank] = self._death(rank)
        return bool(ready)

    def _take(self, rank: int, message: tuple[Any, ...]) -> None:
        if message[0] == "mark":
            _, name, value, at = message
            self._marks[rank, name] = (value, at)
        elif message[0] == "returned":
            self._outcomes[rank] = Outcome(rank, value=message[1], at=message[2])
        else:
            error, text, fields, trace = message[1]
            self._outcomes[rank] = Outcome(
                rank, error=error, message=text, fields=fields, trace=trace, at=message[2]
            )

    def _death(self, rank: int) -> Outcome:
        at = time.monotonic()
        self._processes[rank].join(EXIT_GRACE_S)
        code = self._processes[rank].exitcode
        return Outcome(rank, error="Died", message=f"exit code {code}", at=at, signal=max(0, -(code or 0)))

    # The end

    def close(self) -> None:
        """Kills what still runs, also what is frozen, and waits for it."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(EXIT_GRACE_S)
        for pipe in self._pipes.values():
            pipe.close()
        alive = [process.name for process in self._processes if process.is_alive()]
        assert not alive, f"{alive} survived SIGKILL"

    def __enter__(self) -> ProcessRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_stopped(pid: int) -> bool:
    """Whether every thread of the process is in the stopped state."""
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/stat") as file:
                # The state follows the name, which is in parentheses and may hold any character.
                state = file.read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state not in "Tt":
            return False
    return True
