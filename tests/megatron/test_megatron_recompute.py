"""Which plan a dispatch in a checkpoint gets: nested ones, other libraries', more calls than before."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint

from uccl_ep_train.megatron import recompute

pytestmark = pytest.mark.megatron


class Plan:
    """A name to tell it from others."""

    def __init__(self, name: str) -> None:
        self.name = name


class Layer:
    """Dispatches as a manager does: with a saved plan, or one that it makes. `log` has the plans' names."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        plan = recompute.saved_plan(self)
        if plan is None:
            plan = Plan(f"plan {self._count}")
            self._count += 1
            self.made.add(plan)
        recompute.save_plan(self, plan)
        self.log.append(plan.name)
        return (x * x).exp()


def new_x() -> torch.Tensor:
    return torch.full((3,), 0.5, requires_grad=True)


class TheirCheckpoint(torch.autograd.Function):
    """As those of Megatron and TransformerEngine that are reentrant."""

    @staticmethod
    def forward(ctx: Any, run_function: Any, more: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.run_function = run_function
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: torch.Tensor = run_function(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor | None]:
        (x,) = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = ctx.run_function(x)
        torch.autograd.backward(y, grad)
        return None, None, x.grad


class UnknownCheckpoint(TheirCheckpoint):
    """Of a library that we have not heard of."""

    forward = TheirCheckpoint.forward


def reentrant(function: Any, x: torch.Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=True)


def not_reentrant(function: Any, x: torch.Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False)


def of_te(function: Any, x: torch.Tensor) -> Any:
    return TheirCheckpoint.apply(function, None, x)


def of_te_not_reentrant(function: Any, x: torch.Tensor) -> Any:
    """TransformerEngine's has a frame and a hook as torch's has, and recomputes as a whole."""
    te = sys.modules["transformer_engine.pytorch.distributed"]

    class Frame:
        recompute_fn = staticmethod(function)

    frame = Frame()
    with te._checkpoint_hook(frame):
        y = function(x)

    def recompute(grad: torch.Tensor) -> None:
        frame.recompute_fn(x)

    y.register_hook(recompute)
    return y


KINDS = [reentrant, not_reentrant, of_te, of_te_not_reentrant]


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("megatron.core")

    class Hook:
        def __init__(self, frame: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    te = ModuleType("transformer_engine.pytorch.distributed")
    te._CheckpointFunction, te._checkpoint_hook = TheirCheckpoint, Hook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, te.__name__, te)
    undo = recompute.record_checkpoints()
    yield
    for put_back in undo:
        put_back()
    assert te._checkpoint_hook is Hook


@pytest.mark.parametrize("kind", KINDS)
def test_backward_passes_in_any_order_get_the_plans_of_their_own_first_runs(kind: Any) -> None:
    layer = Layer()
    losses = [kind(layer, new_x()).sum() for _ in range(3)]
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    assert layer.log == ["plan 0", "plan 1", "plan 2", "plan 1", "plan 2", "plan 0"]


@pytest.mark.parametrize("inner", [reentrant, not_reentrant, of_te])
@pytest.mark.parametrize("outer", [reentrant, not_reentrant, of_te])
def test_nested_checkpoints_recompute_with_the_plans_of_the_first_run(outer: Any, inner: Any) -> None:
    first, second = Layer(), Layer()
    outer(lambda x: inner(second, first(x) + 1).sin(), new_x()).sum().backward()
    assert len(second.log) == 3
    assert set(first.log) == set(second.log) == {"plan 0"}


@pytest.mark.parametrize("outer", [reentrant, not_reentrant, of_te])
def test_a_backward_pass_inside_of_a_checkpoint_does_not_put_its_plans_out_of_step(outer: Any) -> None:
    """The inner recomputation is one of the outer one's calls."""
    layer = Layer()

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            reentrant(layer, inside).sum().backward()
        assert inside.grad is not None
        return layer(x * inside.grad).sin()

    outer(function, new_x()).sum().backward()
    # Two calls of the inner checkpoint with the first plan, then one of the second: once, and again. Torch's
    # runs the outer function in between, too, for tensors that the inner backward pass needs: up to the first
    # call, and up to the second.
    between = 3 if outer is not_reentrant else 0
    assert layer.log == ["plan 0"] * between + ["plan 0", "plan 0", "plan 1"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_called_more_often_when_it_is_recomputed_makes_a_new_plan(kind: Any) -> None:
    layer, other = Layer(), Layer()
    again = False

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal again
        if again:  # another layer before it does not matter
            with torch.no_grad():
                other(x)
        y = layer(layer(x))
        if again:
            y = y + layer(x)
        again = True
        return y

    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        loss = kind(function, new_x()).sum()
    try:
        loss.backward()
    except torch.utils.checkpoint.CheckpointError:
        assert kind is not_reentrant, "torch refuses it, once it has run"
    assert layer.log[:4] == ["plan 0", "plan 1", "plan 0", "plan 1"]
    assert layer.log[4:] in ([], ["plan 2"])


def test_the_recomputation_of_a_checkpoint_that_we_do_not_know_makes_a_new_plan() -> None:
    """Never the plan of another layer or call; also inside of one that we know."""
    layer = Layer()
    UnknownCheckpoint.apply(layer, None, new_x()).sum().backward()
    assert layer.log == ["plan 0", "plan 1"]


@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_freed_with_the_graph_without_a_garbage_collection(kind: Any) -> None:
    layer = Layer()
    gc.disable()
    try:
        loss = kind(layer, new_x())
        assert len(layer.made) == 1
        del loss
        assert len(layer.made) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_run_that_raises_leaves_nothing_behind(kind: Any) -> None:
    layer = Layer()

    def function(x: torch.Tensor) -> torch.Tensor:
        layer(x)
        raise ArithmeticError

    with pytest.raises(ArithmeticError) as caught:
        kind(function, new_x())
    kind(layer, new_x()).sum().backward()
    assert layer.log == ["plan 0", "plan 1", "plan 1"]
    del caught


def test_without_records_every_run_makes_a_plan() -> None:
    """Control for the tests above."""
    layer = Layer()
    for kind in (UnknownCheckpoint,):
        kind.apply(layer, None, new_x()).sum().backward()
    assert len(set(layer.log)) == len(layer.log) == 2
