"""`close(abort=True)` from another thread ends a wait: what a monitor of a job needs to begin anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.unit.by_hand import create, dispatch, inputs, on_all, outcome
from uccl_ep_train import Buffer
from uccl_ep_train.errors import ClosedError, CommunicationError

SOON_S = 5.0  # on a busy machine; the deadlines of `by_hand` are 10 and 30 s


def new_plan(buffer: Buffer, result: Any) -> None:
    dispatch(buffer)


def new_plan_async(buffer: Buffer, result: Any) -> None:
    buffer.dispatch_async(*inputs(buffer.rank)).wait()


def saved_plan(buffer: Buffer, result: Any) -> None:
    dispatch(buffer, handle=result.handle)


def combine(buffer: Buffer, result: Any) -> None:
    buffer.combine(result.rows, result.handle)


def pending_combine(buffer: Buffer, result: Any) -> None:
    buffer.combine_async(result.rows, result.handle).wait()


def backward(buffer: Buffer, result: Any) -> None:
    result.rows.float().sum().backward()


WAITS = [new_plan, new_plan_async, saved_plan, combine, pending_combine, backward]


def begun(buffer: Buffer) -> Any:
    x, *routing = inputs(buffer.rank)
    return buffer.dispatch(x.requires_grad_(), *routing)


@pytest.mark.parametrize("wait", WAITS)
def test_closing_with_abort_from_another_thread_ends_a_wait_with_a_typed_error(
    wait: Callable[[Buffer, Any], None],
) -> None:
    first, second = create(2)
    results = on_all([first, second], begun)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome, lambda: wait(first, results[0]))
        time.sleep(0.5)
        assert not waiting.done()  # control: it waits for the other rank
        started = time.monotonic()
        first.close(abort=True)
        error = waiting.result()
        assert time.monotonic() - started < SOON_S
    assert isinstance(error, ClosedError | CommunicationError), error
    assert isinstance(outcome(lambda: dispatch(first)), ClosedError)
    # The other rank need not wait for a deadline either. It may complete what the first one had sent whole.
    started = time.monotonic()
    errors = [outcome(lambda: dispatch(second)) for _ in range(2)]
    assert isinstance(errors[-1], CommunicationError)
    assert time.monotonic() - started < SOON_S
    second.close()


def test_all_threads_that_wait_are_unblocked_and_closing_twice_at_once_is_once() -> None:
    first, second = create(2)
    (result, _) = on_all([first, second], begun)
    pending = [first.combine_async(result.rows, result.handle) for _ in range(3)]
    gate = threading.Barrier(2)

    def close() -> None:
        gate.wait(20)
        first.close(abort=True)

    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(outcome, entry.wait) for entry in pending]
        time.sleep(0.3)
        closing = [pool.submit(close) for _ in range(2)]
        errors = [entry.result(SOON_S) for entry in waiting]
        assert [entry.result(SOON_S) for entry in closing] == [None, None]
    assert all(isinstance(error, ClosedError | CommunicationError) for error in errors), errors
    second.close()


def test_gradients_of_a_wait_that_was_ended_are_not_made_up() -> None:
    first, second = create(2)
    x, *routing = inputs(0)
    x.requires_grad_()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(first.dispatch, x, *routing), pool.submit(begun, second)]
        result = both[0].result()
        both[1].result()
        waiting = pool.submit(outcome, lambda: result.rows.float().sum().backward())
        time.sleep(0.3)
        first.close(abort=True)
        assert isinstance(waiting.result(SOON_S), ClosedError | CommunicationError)
    assert x.grad is None or not bool(torch.isfinite(x.grad).all())
    second.close()
