"""When a dispatch of CUDA tensors gets memory, and what it does until the counts come.

On CPU tensors, with a stand-in for the engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from uccl_ep_train.common.handle import RowLayout
from uccl_ep_train.core import operations
from uccl_ep_train.core.calls import Call, DispatchCall
from uccl_ep_train.core.cuda import CudaLauncher
from uccl_ep_train.core.operations import Dispatched
from uccl_ep_train.core.pending import InFlight
from uccl_ep_train.core.routing import Routing

T, H, K, L = 6, 128, 2, 3


@dataclass
class Plan:
    num_rows: int = 0  # a guess at first
    nbytes: int = 256
    num_tokens: int = T
    plan_id: int = 1
    expert_alignment: int = 1
    routing_kind: str = "topk"
    routing_width: int = K
    counts_begin: int = 8
    counts_end: int = 8 + 8 * L
    tokens_per_expert: list[int] = field(default_factory=list)
    tokens_per_expert_exact: list[int] = field(default_factory=list)


@dataclass
class Op:
    """counts: what comes; memory: rows of each output that was given, and whether the counts were known"""

    plan: Plan
    counts: list[int]
    is_guessed: bool = False
    counts_known: bool = False
    placed: bool = False
    interrupt: type[BaseException] | None = None
    memory: list[tuple[int, bool]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # addresses
    done: bool = False
    rehearsals: int = 0

    def wait_counts(self, address: int, rehearse: Callable[[], None]) -> int:
        if self.interrupt is not None:
            raise self.interrupt("while it waited")
        for _ in range(self.rehearsals):
            rehearse()
        guess, self.plan.num_rows = self.plan.num_rows, sum(self.counts)
        self.placed = self.is_guessed and self.plan.num_rows <= guess
        self.counts_known = True
        self.is_guessed &= self.placed
        self.plan.tokens_per_expert = self.counts
        ctypes.memmove(address, (ctypes.c_int64 * L)(*self.counts), 8 * L)
        return self.plan.num_rows

    def give_up_guess(self) -> None:
        assert self.is_guessed and self.memory == []
        self.is_guessed = False

    def set_output(self, memory: list[int], stream: int) -> None:
        rows, _, _, experts, _, plan = memory
        assert rows != 0 and plan != 0 and experts == 0
        self.memory.append((self.plan.num_rows, self.counts_known))
        self.rows.append(rows)


class Engine:
    def __init__(self, op: Op) -> None:
        self.op = op
        self.failures: list[str] = []
        self.refusals: list[str] = []
        self.exchanged = False  # something was launched before there was memory

    def dispatch(self, args: Any, plan: Any, stream: int) -> Op:
        self.exchanged = not self.op.is_guessed and not self.op.counts_known
        return self.op

    def num_calls(self) -> int:
        return int(self.exchanged or self.op.memory != []) + len(self.refusals)

    def refused(self, why: str, stream: int) -> None:
        self.refusals.append(why)

    def fail(self, text: str) -> None:
        self.failures.append(text)


class OnCpu(CudaLauncher):
    def _stream(self) -> int:
        return 0


def start(
    op: Op, *, capacity: int | None = None, aside: bool = False, engine: Engine | None = None
) -> tuple[Dispatched, Engine, InFlight]:
    engine, in_flight = engine or Engine(op), InFlight()
    launcher = OnCpu(engine, in_flight, object(), torch.device("cpu"), L)
    x_TH = torch.ones(T, H, dtype=torch.bfloat16)
    routed = Routing("topk", torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K))
    call = DispatchCall(
        x=x_TH,
        routed=routed,
        handle=None,
        rows=RowLayout(capacity=capacity),
        wire="fp8",
        scale="pow2",
        fp8_rows=True,
        attach=False,
    )
    with Call(launcher, "dispatch"):
        launched = launcher.dispatch(call, aside=aside)
    return launched, engine, in_flight


def shapes(launched: Dispatched) -> list[tuple[int, ...]]:
    rows, scales, weights, experts, _ = launched.outputs
    assert scales is not None and weights is not None and experts is None
    return [tuple(rows.shape), tuple(scales.shape), tuple(weights.shape)]


def expect_rows(launched: Dispatched, num_rows: int, counts: list[int]) -> None:
    assert shapes(launched) == [(num_rows, H), (num_rows, 1), (num_rows,)]
    assert launched.handle.num_rows == num_rows
    assert launched.tokens_per_expert.tolist() == counts == list(launched.handle.tokens_per_expert or ())


@pytest.mark.parametrize("guess", [None, 20])
def test_rehearsals_while_counts_are_waited_for_change_nothing(guess: int | None) -> None:
    op = Op(Plan(num_rows=guess or 0), [4, 0, 7], is_guessed=guess is not None, rehearsals=3)
    launched, _, _ = start(op)
    expect_rows(launched, 11, [4, 0, 7])
    assert launched.outputs.rows.data_ptr() == op.rows[-1] and len(op.memory) == 1


def test_a_rehearsal_runs_what_follows_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(operations.Outputs, "shrinking", lambda outputs: asked.append)
    start(Op(Plan(num_rows=20), [4, 0, 7], is_guessed=True, rehearsals=2))
    assert asked == [20, 20, 11]


def test_memory_by_a_guess_is_given_before_the_counts_come() -> None:
    op = Op(Plan(num_rows=20), [4, 0, 7], is_guessed=True)
    launched, engine, _ = start(op)
    assert op.memory == [(20, False)] and engine.failures == []
    expect_rows(launched, 11, [4, 0, 7])
    # The first rows of what was given.
    assert op.rows == [launched.outputs.rows.data_ptr()]
    assert launched.outputs.rows.untyped_storage().nbytes() == 20 * H


def test_a_guess_that_was_too_low_is_followed_by_the_exact_size() -> None:
    op = Op(Plan(num_rows=10), [4, 0, 7], is_guessed=True)
    launched, _, _ = start(op)
    assert op.memory == [(10, False), (11, True)]
    expect_rows(launched, 11, [4, 0, 7])
    assert launched.outputs is launched.received
    assert op.rows[1] == launched.outputs.rows.data_ptr()


def test_without_memory_for_the_guess_the_counts_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op(Plan(num_rows=20), [4, 0, 7], is_guessed=True)
    allocate = operations._allocate

    def short_of_memory(call: Any, codes: Any, num_rows: int) -> Any:
        if num_rows > 11:
            raise torch.OutOfMemoryError("no more")
        return allocate(call, codes, num_rows)

    monkeypatch.setattr(operations, "_allocate", short_of_memory)
    launched, engine, _ = start(op)
    assert op.memory == [(11, True)] and engine.failures == []
    expect_rows(launched, 11, [4, 0, 7])


def test_without_a_guess_nothing_is_allocated_before_the_counts() -> None:
    op = Op(Plan(), [1, 2, 3])
    launched, _, _ = start(op)
    assert op.memory == [(6, True)]
    expect_rows(launched, 6, [1, 2, 3])


def test_with_a_capacity_nobody_waits() -> None:
    op = Op(Plan(num_rows=9, nbytes=8 + 8 * L + 8), [], counts_known=True)
    launched, _, _ = start(op, capacity=9)
    assert op.memory == [(9, True)] and shapes(launched) == [(9, H), (9, 1), (9,)]
    assert launched.tokens_per_expert.shape == (L,) and launched.overflow is not None
    assert launched.handle.tokens_per_expert is None


@pytest.mark.parametrize("guessed", [True, False])
def test_who_is_interrupted_while_it_waits_for_counts_tells_the_others(guessed: bool) -> None:
    op = Op(Plan(num_rows=20), [4, 0, 7], is_guessed=guessed, interrupt=KeyboardInterrupt)
    engine = Engine(op)
    with pytest.raises(KeyboardInterrupt):
        start(op, engine=engine)
    assert engine.failures == ["dispatch was given up by KeyboardInterrupt: while it waited"]


@pytest.mark.parametrize("capacity", [9, None])
def test_without_memory_a_dispatch_is_refused_if_nothing_of_it_was_launched(
    capacity: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(operations, "_allocate", no_memory)
    op = Op(Plan(num_rows=9, nbytes=8 + 8 * L + 8), [1, 2, 3], counts_known=capacity is not None)
    engine = Engine(op)
    with pytest.raises(torch.OutOfMemoryError):
        start(op, capacity=capacity, engine=engine)
    said = "OutOfMemoryError: no more"
    # Without a capacity peers have the counts of this rank, and wait for its rows.
    assert engine.refusals == ([said] if capacity is not None else [])
    assert engine.failures == ([] if capacity is not None else [f"dispatch was given up by {said}"])


def test_only_what_runs_aside_is_kept_alive_by_the_buffer() -> None:
    for aside in (False, True):
        op = Op(Plan(num_rows=20), [4, 0, 7], is_guessed=True)
        assert len(start(op, aside=aside)[2]) == int(aside)
