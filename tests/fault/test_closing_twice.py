"""A rank that closes and waits: another thread, or a signal, cuts that short."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.fault.test_leaving import LEAVER, PROMPTLY_S, SETTINGS, inputs, make_buffer, use
from tests.harness import RankGroup
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer, DispatchHandle
from uccl_ep_train.errors import EpError, PeerFailed
from uccl_ep_train.megatron import plugin
from uccl_ep_train.megatron.buffers import BufferPool

pytestmark = pytest.mark.fault

WAIT_S = 3.0  # how long a close waits that nobody cuts short


@contextmanager
def closing(close: Callable[[], None]) -> Iterator[None]:
    """Another thread is in a close that waits; in the end it is through."""
    thread = threading.Thread(target=close)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    yield
    thread.join(PROMPTLY_S)
    assert not thread.is_alive()


def run_alone(deadline: str, alone: Callable[[Buffer, DispatchHandle], None]) -> None:
    """`alone` on rank 0 of a group, after a dispatch. The others wait for its end, and hear that it has left.

    deadline: the one that is `WAIT_S`
    """
    with RankGroup(4, SETTINGS | {deadline: WAIT_S}) as group:
        through = threading.Event()

        def step(rank: int, buffer: Buffer) -> None:
            handle = buffer.dispatch(*inputs()).handle
            if rank == 0:
                try:
                    alone(buffer, handle)
                finally:
                    through.set()
                return
            through.wait(30)
            with pytest.raises(PeerFailed):
                use(buffer)

        group.run(step)
        group.broken = True


def test_an_abort_ends_a_close_that_waits_for_ranks() -> None:
    def alone(buffer: Buffer, _: DispatchHandle) -> None:
        with closing(buffer.close):
            started = time.monotonic()
            buffer.close(abort=True)
            assert time.monotonic() - started < PROMPTLY_S < WAIT_S
        buffer.close(abort=True)

    run_alone("progress_timeout_s", alone)


def test_an_abort_ends_a_close_that_waits_for_an_operation() -> None:
    def alone(buffer: Buffer, handle: DispatchHandle) -> None:
        pending = buffer.dispatch_async(inputs()[0], handle=handle)
        with closing(buffer.close):
            started = time.monotonic()
            buffer.close(abort=True)
            assert time.monotonic() - started < PROMPTLY_S < WAIT_S
        with pytest.raises(EpError):
            pending.wait()

    run_alone("arrival_timeout_s", alone)


def test_a_second_close_without_an_abort_waits_for_the_first() -> None:
    """Control: the first would wait for as long as its deadline says."""

    def alone(buffer: Buffer, _: DispatchHandle) -> None:
        started = time.monotonic()
        with closing(buffer.close):
            buffer.close()
            assert time.monotonic() - started > WAIT_S - 0.3

    run_alone("progress_timeout_s", alone)


def test_an_abort_ends_a_disable_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(buffer: Buffer, _: DispatchHandle) -> None:
        pool = BufferPool({})
        pool._buffers["group", "config"] = buffer  # type: ignore[index]
        monkeypatch.setattr(plugin, "_enabled", plugin._Enabled(pool, reuses_plans=True))
        with closing(plugin.disable):
            plugin.disable(abort=True)
            assert not list(pool)
        assert buffer.closed

    run_alone("progress_timeout_s", alone)


def close_until_a_signal(rank: Rank) -> float:
    """How long a close took, until the handler of a signal aborted it."""
    buffer = make_buffer(rank)
    use(buffer)
    if rank.rank == LEAVER:
        rank.wait_for("end")
        return 0.0
    signal.signal(signal.SIGALRM, lambda *_: buffer.close(abort=True))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    started = time.monotonic()
    buffer.close()
    return time.monotonic() - started


def test_a_handler_of_a_signal_ends_a_close_that_waits() -> None:
    with ProcessRanks(4, close_until_a_signal) as ranks:
        outcomes = ranks.outcomes(timeout_s=20, ranks=[rank for rank in range(4) if rank != LEAVER])
        ranks.tell("end")
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
        assert outcome.value < PROMPTLY_S + 0.3 < SETTINGS["progress_timeout_s"]
