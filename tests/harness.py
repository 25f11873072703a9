"""Ranks as threads of one process.

    def step(rank, buffer):
        return buffer.dispatch(...)

    results = run_ranks(4, {"num_experts": 8, "hidden": 256, "domain_size": 2}, step)

What to feed them, and what the oracle expects of them: `tests/cases.py`.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import PeerFailed
from uccl_ep_train.group.bootstrap import LocalBootstrap

DEFAULT_TIMEOUT_S = 60.0
ABORT_GRACE_S = 10.0

Config = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
"""Arguments of `EpConfig`, or a function that gives those of a rank."""

ON_GPUS = os.environ.get("UCCL_EP_BACKEND") == "cuda"
"""pytest --backend cuda: with a GPU for each rank, in domains as on the host."""

# Short deadlines: a defect shows within the limit of a test. Little memory: many engines may live at a time.
TEST_DEFAULTS: dict[str, Any] = {
    "backend": "cuda" if ON_GPUS else "host",
    "budget_bytes": (64 if ON_GPUS else 16) << 20,  # memory of a GPU comes in pages of 2 MiB
    "arrival_timeout_s": 40.0,
    "progress_timeout_s": 20.0,
}

# ------------------------------------------------------------------------------------------- ranks


class RanksHung(AssertionError):
    """Ranks did not end in time, and not after their buffers were aborted either."""


@dataclass(frozen=True)
class Outcome:
    """What one rank did: `value` if `error` is None. `seconds` until it returned or raised."""

    rank: int
    value: Any
    error: BaseException | None
    seconds: float


@dataclass
class _Job:
    run: Callable[[int], Any]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class RankGroup:
    """Ranks as threads, each with a live `Buffer` that serves any number of `run` calls. A context manager.

    Raises what `run` raises if the buffers cannot be created.
    """

    def __init__(self, num_ranks: int, config: Config, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        per_rank = [config(rank) if callable(config) else config for rank in range(num_ranks)]
        configs = [EpConfig(**{**TEST_DEFAULTS, **arguments}) for arguments in per_rank]
        self.num_ranks = num_ranks
        self.broken = False
        self._hung = False
        self._buffers: dict[int, Buffer] = {}
        self._jobs: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in range(num_ranks)]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(num_ranks)
        ]
        for thread in self._threads:
            thread.start()
        bootstraps = LocalBootstrap.create(num_ranks, timeout_s=timeout_s)

        def create(rank: int) -> None:
            self._buffers[rank] = Buffer(None, configs[rank], bootstrap=bootstraps[rank])

        try:
            _raise_failures(self._outcomes(create, timeout_s))
        except BaseException:
            self.close()
            raise

    def buffer(self, rank: int) -> Buffer:
        return self._buffers[rank]

    def outcomes(
        self, fn: Callable[[int, Buffer], Any], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        """fn(rank, buffer) on every rank at once; by rank, what each returned or raised.

        A rank that raises aborts its buffer, so that nobody waits for it; the group is then `broken`.
        """
        assert not self.broken, "a rank of this group has failed before"
        return self._outcomes(lambda rank: fn(rank, self._buffers[rank]), timeout_s)

    def run(self, fn: Callable[[int, Buffer], Any], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """fn(rank, buffer) on every rank at once; its results by rank.

        Raises `ExceptionGroup` with the exceptions of all ranks that failed, the likely causes first, each
        with a note naming its rank; `RanksHung` with the stacks of those that were late.
        """
        outcomes = self.outcomes(fn, timeout_s=timeout_s)
        _raise_failures(outcomes)
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Closes the buffers, all ranks together, and ends the threads."""

        def shut(rank: int) -> None:
            buffer = self._buffers.get(rank)
            if buffer is not None:
                buffer.close(abort=self.broken)

        if not any(thread.is_alive() for thread in self._threads):
            return
        try:
            if not self._hung:
                _raise_failures(self._outcomes(shut, DEFAULT_TIMEOUT_S))
        finally:
            for jobs in self._jobs:
                jobs.put(None)
            for thread in self._threads:
                thread.join(ABORT_GRACE_S)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.broken |= kind is not None
        self.close()

    def _serve(self, rank: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
            torch.cuda.set_stream(torch.cuda.Stream())  # not the one that the process has in common
            if ON_GPUS:
                torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
        while (job := self._jobs[rank].get()) is not None:
            started = time.monotonic()
            value, failure = None, None
            try:
                value = job.run(rank)
            except BaseException as error:
                failure = error
                error.add_note(f"on rank {rank}")
                self._give_up(rank)
            job.outcomes[rank] = Outcome(rank, value, failure, time.monotonic() - started)
            job.ended.release()
            # Or the next get() would keep the tensors of this job alive.
            del job, value, failure

    def _give_up(self, rank: int) -> None:
        self.broken = True
        buffer = self._buffers.get(rank)
        if buffer is not None:
            buffer.close(abort=True)

    def _outcomes(self, run: Callable[[int], Any], timeout_s: float) -> list[Outcome]:
        job = _Job(run)
        for jobs in self._jobs:
            jobs.put(job)
        deadline = time.monotonic() + timeout_s
        num_ended = 0
        while num_ended < self.num_ranks:
            if job.ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
                num_ended += 1
                continue
            late = [rank for rank in range(self.num_ranks) if rank not in job.outcomes]
            if not late:
                break
            stacks = self._stacks(late)
            for rank in list(self._buffers):
                self._give_up(rank)
            for _ in late:
                job.ended.acquire(timeout=ABORT_GRACE_S)
            alive = [rank for rank in late if rank not in job.outcomes]
            self._hung = bool(alive)
            after = f"ranks {alive} did not stop when aborted" if alive else "all stopped when aborted"
            raise RanksHung(f"ranks {late} did not end within {timeout_s:g} s; {after}\n{stacks}")
        return [job.outcomes[rank] for rank in range(self.num_ranks)]

    def _stacks(self, ranks: Sequence[int]) -> str:
        frames = sys._current_frames()
        texts = []
        for rank in ranks:
            frame = frames.get(self._threads[rank].ident or -1)
            texts.append(f"rank {rank}:\n" + "".join(traceback.format_stack(frame) if frame else []))
        return "".join(texts)


def _raise_failures(outcomes: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    # That another rank failed is a consequence, and of little help.
    errors.sort(key=lambda error: isinstance(error, PeerFailed))
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {len(outcomes)} ranks failed", errors)


def run_ranks(
    num_ranks: int,
    config: Config,
    fn: Callable[[int, Buffer], Any],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """`RankGroup.run` once, with a group of its own. No thread outlives it."""
    with RankGroup(num_ranks, config, timeout_s=timeout_s) as group:
        return group.run(fn, timeout_s=timeout_s)
