"""A call that is refused on one rank takes its number there: rows of different calls never meet."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import LAYOUTS, EngineSpec, check_case, make_case
from tests.harness import RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.errors import (
    ArrivalTimeout,
    ClosedError,
    CommunicationError,
    PeerFailed,
    RankMismatchError,
)

pytestmark = pytest.mark.fault

T, H, K, E = 20, 256, 2, 8
DEVIANT = 2
PROMPTLY_S = 10.0  # far below the deadlines of the harness
ALL_LAYOUTS = pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1"])


def group_of(layout: str, **settings: Any) -> RankGroup:
    spec = EngineSpec(domains=LAYOUTS[layout], num_experts=E, hidden=H, settings=tuple(settings.items()))
    return spec.group()


def rows(batch: int, count: int = T) -> Tensor:
    """A batch's rows hold its number and 1."""
    return torch.full((count, H), 1.0 + batch, dtype=torch.bfloat16)


def routing(expert: int = 0) -> Tensor:
    """expert: the first one of the first token"""
    topk_idx_TK = torch.arange(T * K).reshape(T, K) % E
    topk_idx_TK[0, 0] = expert
    return topk_idx_TK


def dispatch(buffer: Buffer, _: Any, batch: int, /, **changes: Any) -> Any:
    return buffer.dispatch(**{"x": rows(batch), "topk_idx": routing(), **changes})


def dispatch_async(buffer: Buffer, _: Any, batch: int, /, **changes: Any) -> Any:
    return buffer.dispatch_async(**{"x": rows(batch), "topk_idx": routing(), **changes}).wait()


def cached(buffer: Buffer, handle: Any, batch: int) -> Any:
    return buffer.dispatch(rows(batch), handle=handle)


def limited(buffer: Buffer, handle: Any, batch: int) -> Any:
    return dispatch(buffer, handle, batch, capacity=4 * T)


def combine(buffer: Buffer, handle: Any, batch: int) -> Tensor:
    return buffer.combine(rows(batch, handle.num_rows), handle)


def combine_async(buffer: Buffer, handle: Any, batch: int) -> Tensor:
    return buffer.combine_async(rows(batch, handle.num_rows), handle).wait()


def fail_once(buffer: Buffer, launch: str, error: BaseException) -> None:
    """The next launch is given up, as when memory runs out or a signal comes before anything is queued."""

    def fail(*_: Any, **__: Any) -> Any:
        delattr(buffer._launcher, launch)
        raise error

    setattr(buffer._launcher, launch, fail)


def short_of_memory(launch: str, call: Any) -> Any:
    def refused(buffer: Buffer, handle: Any) -> Any:
        fail_once(buffer, launch, torch.OutOfMemoryError("no 3 GiB"))
        return call(buffer, handle, 0)

    return refused


def interrupted(buffer: Buffer, handle: Any) -> Any:
    fail_once(buffer, "combine", KeyboardInterrupt())
    return combine(buffer, handle, 0)


def backward_of_dispatch(buffer: Buffer, handle: Any, _: int) -> None:
    buffer.dispatch(rows(0).requires_grad_(), handle=handle).rows.sum().backward()


def backward_of_combine(buffer: Buffer, handle: Any, _: int) -> None:
    buffer.combine(rows(0, handle.num_rows).requires_grad_(), handle).sum().backward()


def preparing(buffer: Buffer, handle: Any) -> None:
    with buffer.preparing("dispatch"):
        raise ValueError("no\nrouting")


Call = Callable[[Buffer, Any, int], Any]
# what is refused: (the call that is, the one that the others make, why)
REFUSED: dict[str, tuple[Callable[[Buffer, Any], Any], Call, str]] = {
    "an expert out of range": (
        lambda b, h: dispatch(b, h, 0, topk_idx=routing(E)), dispatch, r"RoutingError: topk_idx\[0, 0\] = 8",
    ),
    "a dtype": (lambda b, h: dispatch(b, h, 0, x=rows(0).double()), dispatch, "DtypeError: x is float64"),
    "a shape": (lambda b, h: dispatch(b, h, 0, x=rows(0, 3)), dispatch, "ShapeError: topk_idx has 20 rows"),
    "dispatch_async": (
        lambda b, h: dispatch_async(b, h, 0, topk_idx=routing(-2)), dispatch_async, "RoutingError",
    ),
    "a capacity": (lambda b, h: dispatch(b, h, 0, capacity=-1), limited, "InputError: capacity = -1"),
    "rows for a handle": (
        lambda b, h: b.dispatch(rows(0, 3), handle=h), cached, "ShapeError: .* plan is for 20",
    ),
    "a handle": (lambda b, h: dispatch(b, h, 0, handle=3), dispatch, "DtypeError: handle is int"),
    "combine": (lambda b, h: b.combine(rows(0, 3), h), combine, "ShapeError: .*the handle's dispatch gave"),
    "combine_async": (
        lambda b, h: b.combine_async(rows(0), h, grad_dtype="int4"), combine_async, "[A-Z][a-z]+Error: ",
    ),
    "memory": (short_of_memory("dispatch", dispatch), dispatch, "OutOfMemoryError: no 3 GiB"),
    "memory of a combine": (short_of_memory("combine", combine), combine, "OutOfMemoryError: no 3 GiB"),
    "ctrl-c": (interrupted, combine, "KeyboardInterrupt"),
    "arguments": (preparing, dispatch, "ValueError: no routing"),
}  # fmt: skip


def refuse(buffer: Buffer, call: Callable[[], Any]) -> None:
    """Makes a call that is refused, which takes one number."""
    before = buffer._launcher.num_calls()
    with pytest.raises(BaseException) as caught:
        call()
    assert not isinstance(caught.value, (CommunicationError, AssertionError)), caught.value
    assert buffer._launcher.num_calls() == before + 1


def mismatches(group: RankGroup, step: Callable[[int, Buffer], Any]) -> list[str]:
    """Their texts, by rank: no rank has got anything else out of its last call."""
    outcomes = group.outcomes(step, timeout_s=30)
    assert all(isinstance(entry.error, RankMismatchError) for entry in outcomes), outcomes
    assert max(entry.seconds for entry in outcomes) < PROMPTLY_S
    return [str(entry.error) for entry in outcomes]


def expect(texts: list[str], *, numbers: tuple[int, int], why: str, deviant: int = DEVIANT) -> None:
    """numbers: of the calls that met, the other rank's and the deviant's"""
    other, own = numbers
    call = r"(dispatch|combine)\(bf16 as \w+, H=256[^)]*\)"
    met = rf"^call {other} of rank (\d), {call}, met call {own} of rank {deviant}, {call}: "
    for text in texts:
        assert re.search(met + rf"rank {deviant} refused {why}", text), text


@ALL_LAYOUTS
@pytest.mark.parametrize("what", REFUSED)
def test_a_rank_that_goes_on_after_a_refusal_gets_no_rows_and_all_hear_why(what: str, layout: str) -> None:
    refused, usual, why = REFUSED[what]
    with group_of(layout) as group:
        handles = group.run(lambda rank, buffer: dispatch(buffer, None, 0).handle)

        def step(rank: int, buffer: Buffer) -> None:
            if rank == DEVIANT:
                refuse(buffer, lambda: refused(buffer, handles[rank]))
                usual(buffer, handles[rank], 1)
            else:
                usual(buffer, handles[rank], 0)

        expect(mismatches(group, step), numbers=(2, 3), why="call 2: " + why)


@ALL_LAYOUTS
@pytest.mark.parametrize(
    ("backward", "launch"), [(backward_of_dispatch, "combine"), (backward_of_combine, "dispatch")]
)
def test_a_backward_that_is_refused_is_told_of_by_the_next_call(
    backward: Call, launch: str, layout: str
) -> None:
    with group_of(layout) as group:
        handles = group.run(lambda rank, buffer: dispatch(buffer, None, 0).handle)

        def step(rank: int, buffer: Buffer) -> None:
            if rank == DEVIANT:
                # Calls 2 and 3 of all are a forward and its backward.
                forward = buffer._launcher.num_calls() + 1
                fail_once(buffer, launch, MemoryError("no grad"))
                with pytest.raises(MemoryError):
                    backward(buffer, handles[rank], 0)
                assert buffer._launcher.num_calls() == forward + 1
            backward(buffer, handles[rank], 0)

        expect(mismatches(group, step), numbers=(3, 4), why="call 3: MemoryError: no grad")


@ALL_LAYOUTS
def test_ranks_that_all_refuse_for_whatever_reason_are_in_step(layout: str) -> None:
    spec = EngineSpec(domains=LAYOUTS[layout], num_experts=E, hidden=H)
    kinds = list(REFUSED.values())
    with spec.group() as group:
        handles = group.run(lambda rank, buffer: dispatch(buffer, None, 0).handle)

        def step(rank: int, buffer: Buffer) -> None:
            for turn in range(len(kinds)):
                refused, _, _ = kinds[(turn + rank) % len(kinds)]
                refuse(buffer, lambda refused=refused: refused(buffer, handles[rank]))  # type: ignore[misc]
                assert combine(buffer, handles[rank], turn).eq(K * (1 + turn)).all()
            backward_of_dispatch(buffer, handles[rank], 0)

        group.run(step)
        check_case(group, make_case(7, spec, max_tokens=12))


@ALL_LAYOUTS
def test_ranks_that_refuse_different_calls_are_no_match(layout: str) -> None:
    with group_of(layout) as group:
        handles = group.run(lambda rank, buffer: dispatch(buffer, None, 0).handle)

        def step(rank: int, buffer: Buffer) -> None:
            for call in (2, 3):
                if rank == call:
                    refuse(buffer, lambda: dispatch(buffer, None, 0, capacity=-1))
                else:
                    combine(buffer, handles[rank], call)

        expect(mismatches(group, step), numbers=(2, 3), why="call 2: InputError: capacity = -1")


@ALL_LAYOUTS
def test_a_rank_that_repeats_the_call_correctly_is_one_call_ahead(layout: str) -> None:
    with group_of(layout) as group:

        def step(rank: int, buffer: Buffer) -> None:
            if rank == DEVIANT:
                refuse(buffer, lambda: dispatch(buffer, None, 0, topk_idx=routing(E)))
            dispatch(buffer, None, 0)

        expect(mismatches(group, step), numbers=(1, 2), why="call 1: RoutingError: ")


def test_of_several_refusals_the_last_is_told() -> None:
    with group_of("2x2") as group:

        def step(rank: int, buffer: Buffer) -> None:
            dispatch(buffer, None, 0)
            if rank == DEVIANT:
                for capacity in (-1, -2, -3):
                    refuse(buffer, lambda capacity=capacity: dispatch(buffer, None, 0, capacity=capacity))  # type: ignore[misc]
            dispatch(buffer, None, 1)

        texts = mismatches(group, step)
        expect(texts, numbers=(2, 5), why="calls 2 to 4, the last: InputError: capacity = -3")


@ALL_LAYOUTS
def test_a_long_reason_is_cut_and_both_calls_are_still_named(layout: str) -> None:
    with group_of(layout) as group:

        def step(rank: int, buffer: Buffer) -> None:
            if rank == DEVIANT:
                fail_once(buffer, "dispatch", ValueError("öf " * 500))
                refuse(buffer, lambda: dispatch(buffer, None, 0))
            dispatch(buffer, None, 0)

        texts = mismatches(group, step)
        expect(texts, numbers=(1, 2), why=r"call 1: ValueError: (\?+f )+.*\.\.\.$")


@ALL_LAYOUTS
def test_what_was_queued_before_a_refusal_ends_well(layout: str) -> None:
    with group_of(layout) as group:
        handles = group.run(lambda rank, buffer: dispatch(buffer, None, 0).handle)

        def step(rank: int, buffer: Buffer) -> None:
            handle = handles[rank]
            ahead = [buffer.combine_async(rows(n, handle.num_rows), handle) for n in range(8)]
            if rank == DEVIANT:
                refuse(buffer, lambda: dispatch(buffer, None, 0, capacity=-1))
            late = buffer.combine_async(rows(9, handle.num_rows), handle)
            for n, pending in enumerate(ahead):
                assert pending.wait().eq(K * (1 + n)).all()
            late.wait()

        expect(mismatches(group, step), numbers=(10, 11), why="call 10: InputError")


@ALL_LAYOUTS
def test_a_rank_that_never_comes_again_is_named_with_what_it_refused(layout: str) -> None:
    with group_of(layout, arrival_timeout_s=2.0) as group:

        def step(rank: int, buffer: Buffer) -> None:
            dispatch(buffer, None, 0)
            if rank == DEVIANT:
                refuse(buffer, lambda: dispatch(buffer, None, 0, capacity=-1))
                time.sleep(1.0)  # the others find their deadline over first
                while True:
                    buffer.check()
                    time.sleep(0.01)
            dispatch(buffer, None, 0)

        outcomes = group.outcomes(step, timeout_s=30)
        for entry in outcomes:
            assert isinstance(entry.error, ArrivalTimeout) and entry.seconds < 2.0 + 2.0
            assert re.search(f"rank {DEVIANT} to enter.*; rank {DEVIANT} refused call 2", str(entry.error))
        if layout == "1x4":  # ranks of other domains know that, and not why
            assert all("call 2: InputError: capacity = -1" in str(entry.error) for entry in outcomes)


@ALL_LAYOUTS
def test_a_rank_that_leaves_after_a_refusal_says_why(layout: str) -> None:
    with group_of(layout) as group:

        def step(rank: int, buffer: Buffer) -> None:
            if rank == DEVIANT:
                refuse(buffer, lambda: dispatch(buffer, None, 0, capacity=-1))
                buffer.close(abort=True)
            else:
                dispatch(buffer, None, 0)

        outcomes = group.outcomes(step, timeout_s=30)
        others = [entry.error for entry in outcomes if entry.rank != DEVIANT]
        for error in others:
            assert isinstance(error, PeerFailed)
            assert "its last call was refused: InputError: capacity = -1" in str(error)


def test_a_broken_or_closed_buffer_refuses_without_a_number() -> None:
    with group_of("2x2") as group:

        def step(rank: int, buffer: Buffer) -> None:
            with pytest.raises(RankMismatchError):
                dispatch(buffer, None, 0, expert_alignment=1 + rank)
            before = buffer._launcher.num_calls()
            with pytest.raises(RankMismatchError):
                dispatch(buffer, None, 0, capacity=-1)
            buffer._launcher.refuse("nothing")
            assert buffer._launcher.num_calls() == before
            buffer.close()
            with pytest.raises(ClosedError):
                dispatch(buffer, None, 0, capacity=-1)
            assert buffer._launcher.num_calls() == before

        assert all(entry.error is None for entry in group.outcomes(step, timeout_s=30))


@ALL_LAYOUTS
def test_control_without_the_number_batches_mix(layout: str) -> None:
    """What the tests above would miss if it happened: rows of two batches in one result."""
    with group_of(layout) as group:

        def step(rank: int, buffer: Buffer) -> set[float]:
            if rank == DEVIANT:
                buffer._launcher.refuse = lambda why: None  # type: ignore[method-assign]
                with pytest.raises(ValueError):
                    dispatch(buffer, None, 0, capacity=-1)
            got = dispatch(buffer, None, 1 if rank == DEVIANT else 0)
            return set(got.rows[:, 0].tolist())

        assert set().union(*group.run(step)) == {1.0, 2.0}
