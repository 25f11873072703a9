"""dispatch and combine as autograd functions over a finished forward operation and a frozen plan.

    backward of dispatch  =  combine of the rows' gradients; with it, fp32 per pair, the weights' gradients
    backward of combine   =  dispatch of the output's gradients on the saved plan, in `grad_dtype`

A backward is an operation of the whole group: every rank has to run it, and in the same order. Whether it
runs, and whether weights travel with it, must therefore follow from the call structure and never from a
rank's data. So:

* A result is attached to the graph if gradients are enabled and any differentiable argument requires them.
  This must be equal on all ranks (it is if all ranks run one model).
* Once attached, the backward is one operation, whichever of the arguments need a gradient and whichever of
  the results got one: missing gradients are zeros. Weights' gradients travel exactly if weights were given in
  the forward call.
* autograd runs a backward only where a result contributes to the loss. A rank whose loss does not use its
  rows (it may have received none) has to keep them in the graph: a sum over an empty tensor does.
* Under `torch.utils.checkpoint(use_reentrant=False)` recomputation begins at the first saved tensor that
  backward reads, so a rank must not skip its experts where it has no rows; with reentrant ones it may.

No tensor is saved: in-place changes of inputs and outputs are allowed. Second derivatives are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from uccl_ep_train.common.opaque import opaque
from uccl_ep_train.core.routing import is_aligned
from uccl_ep_train.core.tensors import has_memory, is_under_way
from uccl_ep_train.errors import InputError

CombineGradients = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(grad_rows [R, H], grad_row_weights | None) to (grad_x [T, H], grad_values [T, K] or [T, E] | None).

grad_row_weights is [R], or [R, W] if the rows are compact. Both as autograd has them: see `plain`.
"""

DispatchGradients = Callable[[Tensor], Tensor]
"""grad_out [T, H], as autograd has it, to grad_rows [R, H]."""


Gradient = TypeVar("Gradient", Tensor, Tensor | None)


def plain(rows: Gradient) -> Gradient:
    """As an engine takes rows. Gradients are often expanded scalars (from a sum), strided or odd views.

    They may also be sparse (a `gather` can make them so), negated views, zeros that torch keeps no memory
    for, or results of a collective under way. What else has no memory is refused by checks, by name.
    """
    if rows is None:
        return None
    if type(rows) is not Tensor and is_under_way(rows):
        rows = rows.trigger_wait()  # type: ignore[attr-defined]
    if rows.layout != torch.strided:
        rows = rows.to_dense()
    if rows._is_zerotensor():
        rows = rows.clone()
    rows = rows.resolve_neg().contiguous()
    return rows if not has_memory(rows) or is_aligned(rows) else rows.clone()


class _Once(torch.autograd.Function):
    """Gradients, and an error for whoever differentiates them again.

    Unlike torch's `once_differentiable`, it is on the way to the inputs of the first backward. Without that
    `torch.autograd.grad` would pass it by, and return zeros or a part of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any, made: tuple[Tensor | None, ...], *given: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second()


def refuse_second(*_: Any) -> NoReturn:
    raise InputError(
        "a second derivative through dispatch or combine; allowed is the first: backward without create_graph"
    )


def once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward whose gradients nobody can differentiate again without an error."""

    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            made = backward(ctx, *grads)
        if needs_graph(*grads):
            made = _Once.apply(tuple(None if entry is None else entry.detach() for entry in made), *grads)
        return made

    return opaque(run)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        values: Tensor | None,
        filled: tuple[Tensor, Tensor | None],
        combine_gradients: CombineGradients,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(True)
        ctx.combine_gradients = combine_gradients
        # Inside a tuple autograd does not see them as inputs, so that the results are no views and the caller
        # may change them in place.
        return filled

    @staticmethod
    @once
    def backward(
        ctx: Any, grad_rows_RH: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_x_TH, grad_values = ctx.combine_gradients(grad_rows_RH, grad_row_weights)
        need_x, need_values = ctx.needs_input_grad[:2]
        return grad_x_TH if need_x else None, grad_values if need_values else None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RH: Tensor, filled: tuple[Tensor], dispatch_gradients: DispatchGradients, *bias: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(True)
        ctx.dispatch_gradients = dispatch_gradients
        return filled[0]

    @staticmethod
    @once
    def backward(ctx: Any, grad_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        need_rows, _, _, *need_bias = ctx.needs_input_grad
        grad_rows_RH = ctx.dispatch_gradients(grad_out_TH)
        grad_bias = [grad_out_TH if need else None for need in need_bias]
        return grad_rows_RH if need_rows else None, None, None, *grad_bias


def needs_graph(*inputs: Tensor | None) -> bool:
    """Whether a call's results belong on the graph; ranks must agree on it, see the head of this file."""
    if torch.is_grad_enabled():
        for entry in inputs:  # in every call: half the time of any()
            if entry is not None and entry.requires_grad:
                return True
    return False


def place_now() -> int:
    """The place of a call that is launched now. A backward runs nodes by descending place, so ranks that wait
    for their calls in different orders run it in the same one.
    """
    with torch.enable_grad():
        node: Any = _leaf.view_as(_leaf).grad_fn
    return int(node._sequence_nr())


_leaf = torch.zeros((), requires_grad=True, device="cpu")


def _placed(result: Tensor, place: int | None) -> None:
    node: Any = result.grad_fn
    if place is not None and node is not None:
        node._set_sequence_nr(place)


def attach_dispatch(
    x_TH: Tensor,
    values: Tensor | None,
    filled: tuple[Tensor, Tensor | None],
    combine_gradients: CombineGradients,
    place: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The results of a finished dispatch as differentiable functions of x and the weights. `place`: of its
    backward, or None: that of now.
    """
    with torch.enable_grad():
        attached: tuple[Tensor, Tensor | None] = _Dispatch.apply(x_TH, values, filled, combine_gradients)
    _placed(attached[0], place)
    return attached


def attach_combine(
    rows_RH: Tensor,
    bias: tuple[Tensor, ...],
    out_TH: Tensor,
    dispatch_gradients: DispatchGradients,
    place: int | None = None,
) -> Tensor:
    """The result of a finished combine as a differentiable function of the rows and biases. `place`: as in
    `attach_dispatch`.
    """
    with torch.enable_grad():
        attached: Tensor = _Combine.apply(rows_RH, (out_TH,), dispatch_gradients, *bias)
    _placed(attached, place)
    return attached
