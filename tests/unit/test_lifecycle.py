"""Life of a buffer: pending operations, Ctrl-C, errors that stay, every kind of end."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.by_hand import (
    E,
    H,
    T,
    close,
    create,
    dispatch,
    inputs,
    on_all,
    outcome,
    shared_memory,
    together,
)
from uccl_ep_train import Buffer
from uccl_ep_train.errors import (
    ClosedError,
    CommunicationError,
    PeerFailed,
    PlanMismatchError,
    RankMismatchError,
)
from uccl_ep_train.group.lifecycle import check_live_buffers


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """SIGINT as in a program started from a shell; what runs in the background ignores it from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------ pending operations


def test_operations_whose_pending_object_was_dropped_run_and_let_go_of_their_tensors() -> None:
    buffers = create(2)

    def drop(buffer: Buffer) -> bool:
        expected = dispatch(buffer)
        for _ in range(10):
            # The only references to these tensors go away at once.
            buffer.dispatch_async(*(tensor.clone() for tensor in inputs(buffer.rank)))
            buffer.combine_async(expected.rows.clone(), expected.handle)
        last = dispatch(buffer)
        return torch.equal(last.rows, expected.rows) and len(buffer._in_flight) == 0

    assert on_all(buffers, drop) == [True, True]
    close(buffers)


def test_threads_that_wait_for_one_operation_get_one_result() -> None:
    """Else it is on the graph twice, and this rank's backward has an operation more than the others'."""
    buffers = create(2)

    def wait_on_both(buffer: Buffer) -> int:
        x, *routing = inputs(buffer.rank)
        x = x.clone().requires_grad_()
        gate = threading.Barrier(4)
        most = 0

        def wait(pending: Any) -> Any:
            gate.wait(20)
            return pending.wait()

        with ThreadPoolExecutor(4) as pool:
            for _ in range(100):
                results = list(pool.map(wait, [buffer.dispatch_async(x, *routing)] * 4))
                most = max(most, len({id(result) for result in results}))
        return most

    assert on_all(buffers, wait_on_both) == [1, 1]
    close(buffers)


def test_a_finished_operation_keeps_no_tensor() -> None:
    buffers = create(2)

    def forget(buffer: Buffer) -> bool:
        arguments = inputs(buffer.rank)
        x = weakref.ref(arguments[0].untyped_storage())
        result = buffer.dispatch(*arguments)
        rows = weakref.ref(result.rows.untyped_storage())
        del arguments, result
        return x() is None and rows() is None

    assert on_all(buffers, forget) == [True, True]
    close(buffers)


def test_an_operation_that_fails_raises_the_same_error_at_every_wait() -> None:
    first, second = create(2)
    pending = first.combine_async(*_with_handle(first, second))
    second.close(abort=True)
    errors = [outcome(pending.wait) for _ in range(2)]
    assert isinstance(errors[0], PeerFailed) and errors[0] is errors[1]
    first.close()


def _with_handle(first: Buffer, second: Buffer) -> tuple[Tensor, Any]:
    result = on_all([first, second], dispatch)[0]
    return result.rows, result.handle


def _interrupt_in_flight(buffer: Buffer) -> None:
    """Soon after the buffer has an operation in flight."""

    def interrupt() -> None:
        while len(buffer._in_flight) == 0:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_ctrl_c_while_ranks_are_missing_tells_the_others() -> None:
    first, second = create(2)
    _interrupt_in_flight(first)
    with pytest.raises(KeyboardInterrupt):
        dispatch(first)
    told = time.monotonic() + 2.0  # rank 1 is in another domain: until it hears of it, it could go on
    while outcome(second.check) is None and time.monotonic() < told:
        time.sleep(0.01)
    for buffer in (second, first):
        with pytest.raises(PeerFailed, match="rank 0: dispatch was given up by KeyboardInterrupt"):
            dispatch(buffer)
    close([first, second])


def test_a_wait_that_ctrl_c_interrupted_can_be_taken_up_again() -> None:
    first, second = create(2)
    results = on_all([first, second], dispatch)
    pending = first.combine_async(results[0].rows, results[0].handle)
    _interrupt_in_flight(first)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert not pending.done
    second.combine(results[1].rows, results[1].handle)
    assert pending.wait().shape == (T, H)
    close([first, second])


# -------------------------------------------------------------------------- errors that stay


def test_a_broken_buffer_raises_its_first_error_until_it_is_closed() -> None:
    buffers = create(2)
    plans = [result.handle for result in on_all(buffers, dispatch)]

    def differ(buffer: Buffer) -> None:
        x, idx, weights = inputs(buffer.rank)
        buffer.dispatch(x, (idx + buffer.rank) % E, weights, handle=plans[buffer.rank])

    for error in on_all(buffers, differ):
        assert isinstance(error, PlanMismatchError) and "rank 1" in str(error)
    for buffer in buffers:
        for call in (lambda entry=buffer: dispatch(entry), buffer.check):
            assert isinstance(outcome(call), PlanMismatchError)
        assert "broken" in repr(buffer)
    close(buffers)
    for buffer in buffers:
        assert isinstance(outcome(lambda entry=buffer: dispatch(entry)), ClosedError)


def test_no_optimizer_step_is_applied_until_a_broken_buffer_is_closed() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizers = [torch.optim.SGD([weight], lr=1.0), torch.optim.Adam([weight], lr=1.0)]
    buffers = create(2)
    optimizers[0].step()
    assert weight.item() == -1.0
    errors = on_all(
        buffers, lambda entry: entry.dispatch(*inputs(entry.rank), expert_alignment=1 + entry.rank)
    )
    assert all(isinstance(error, RankMismatchError) for error in errors)
    for optimizer in optimizers:
        with pytest.raises(RankMismatchError):
            optimizer.step()
    assert weight.item() == -1.0
    close(buffers)
    optimizers[0].step()
    assert weight.item() == -2.0


# ---------------------------------------------------------------------------------- all ends


def test_close_is_idempotent_and_keeps_the_statistics() -> None:
    buffers = create(2)
    on_all(buffers, dispatch)
    close(buffers)
    close(buffers)
    for buffer in buffers:
        assert buffer.closed and "closed" in repr(buffer)
        assert buffer.stats()["caller.dispatch.calls"] == 1
        assert buffer.stats()["rows.placed"] > 0
        buffer.check()


def test_leaving_the_context_by_an_exception_aborts() -> None:
    buffers = create(2)

    def leave(buffer: Buffer) -> None:
        with buffer:
            if buffer.rank == 0:
                raise ZeroDivisionError
            dispatch(buffer)

    results = on_all(buffers, leave)
    assert isinstance(results[0], ZeroDivisionError)
    assert isinstance(results[1], PeerFailed)
    assert all(buffer.closed for buffer in buffers)


def test_a_buffer_that_is_dropped_gives_up_its_part() -> None:
    buffers = create(2, progress_timeout_s=100.0)
    gone = weakref.ref(buffers[0])
    other = buffers.pop()
    buffers.clear()
    started = time.monotonic()
    gc.collect()
    assert gone() is None
    assert time.monotonic() - started < 50  # Not the deadline that `close` would wait for.
    with pytest.raises(CommunicationError):
        dispatch(other)
    other.close()


def test_ranks_that_drop_their_buffers_at_different_times_do_not_disturb_each_other() -> None:
    """As at the end of a program that does not call close."""
    for _ in range(10):
        buffers = create(2)

        def use(rank: int, buffers: list[Buffer] = buffers) -> Tensor:
            buffer, buffers[rank] = buffers[rank], None
            result = dispatch(buffer)
            return buffer.combine(result.rows, result.handle)  # The last reference goes on return.

        outputs = together([lambda rank=rank: use(rank) for rank in range(2)])
        assert [type(out) for out in outputs] == [Tensor, Tensor]


def test_a_graph_keeps_its_buffer() -> None:
    buffers = create(2)

    def backward(rank: int) -> bool:
        x, idx, weights = inputs(rank, torch.float32)
        x.requires_grad_()
        loss = buffers[rank].dispatch(x, idx, weights).rows.sum()
        done.append(rank)
        while len(done) < 3:
            time.sleep(0.01)
        loss.backward()
        return torch.equal(x.grad, torch.full((T, H), 2.0))

    done: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(backward, rank) for rank in range(2)]
        while len(done) < 2:
            time.sleep(0.01)
        buffers.clear()
        gc.collect()
        done.append(2)
        assert [future.result(30) for future in futures] == [True, True]


def test_a_forked_child_disturbs_nobody() -> None:
    buffers = create(2)
    child = os.fork()
    if child == 0:
        try:
            buffers.clear()
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(result.rows is not None for result in on_all(buffers, dispatch))
    close(buffers)


def test_a_forked_child_is_told_that_a_buffer_is_not_its_own() -> None:
    """As a data loader's workers; without a word it would wait for threads that it does not have."""
    buffers = create(2)
    handles = [result.handle for result in on_all(buffers, dispatch)]
    rows = [torch.ones(handle.num_rows, H, dtype=torch.bfloat16) for handle in handles]
    pending = [b.combine_async(*given) for b, *given in zip(buffers, rows, handles, strict=True)]
    child = os.fork()
    if child == 0:
        refused = 0
        try:
            signal.alarm(20)
            combine = functools.partial(buffers[0].combine, rows[0], handles[0])
            calls = functools.partial(dispatch, buffers[0]), combine, pending[0].wait
            for call in (*calls, buffers[0].check, buffers[0].stats):
                with pytest.raises(ClosedError, match="was forked"):
                    call()
                refused += 1
            check_live_buffers()  # before each step of an optimizer, which are not those of the parent
            buffers[0].close()
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert all(entry.wait().shape == (T, H) for entry in pending)
    close(buffers)


MAKE = """
import os, signal, sys, torch
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uccl_ep_train import Buffer, EpConfig, LocalBootstrap
config = EpConfig(num_experts=8, hidden=128, dispatch_dtype="bf16", budget_bytes=4 << 20)
with ThreadPoolExecutor(2) as pool:
    buffers = list(pool.map(lambda b: Buffer(None, config, bootstrap=b), LocalBootstrap.create(2)))
x, idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64)
with ThreadPoolExecutor(2) as pool:
    results = list(pool.map(lambda b: b.dispatch(x, idx), buffers))
"""
EXIT = """
pending = buffers[0].combine_async(results[0].rows, results[0].handle)  # Its peer never comes.
print("leaving")
"""
FORK = """
import uccl_ep_train.api.operators  # with it, the interpreter empties modules before it drops what they hold
child = os.fork()
if child == 0:
    signal.alarm(20)
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda b: b.dispatch(x, idx), buffers))
    list(pool.map(lambda b: b.close(), buffers))
print("unharmed")
"""


@pytest.mark.parametrize(("program", "says"), [(EXIT, "leaving"), (FORK, "unharmed")], ids=["exit", "fork"])
def test_the_interpreter_exits_with_open_buffers_also_with_those_of_its_parent(
    program: str, says: str
) -> None:
    """With pending operations, too. The end of a forked process hung, and told the parent's peers to stop."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKE + program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        said = child.communicate(timeout=100)
    assert (child.returncode, *said) == (0, f"{says}\n", "")
    assert shared_memory(child.pid) == set()
