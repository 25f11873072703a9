"""Dispatch and combine as torch operators, for torch.compile(fullgraph=True) and torch.export.

    calls = Operators(buffer, capacity=4096)               # outside of what is compiled

    @torch.compile(fullgraph=True)
    def layer(x, topk_idx, topk_weights):
        got = calls.dispatch(x, topk_idx, topk_weights)
        y = experts(got.rows, got.tokens_per_expert) * got.row_weights[:, None]
        return calls.combine(y, got.ticket, len(x))

Counts are tensors: a graph knows the output's capacity and nothing else of the routing. All ranks must run
graphs that call the same operators in the same order, forward and backward.

A plan crosses the graph as a ticket, an int64 tensor of one element in CPU memory. The plan lives as long as
the memory of its ticket. Copies of a ticket keep nothing alive.

Shapes: T tokens of this rank, H hidden, K experts per token, L experts of this rank, C capacity.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from uccl_ep_train.api.buffer import Buffer
from uccl_ep_train.common.handle import DispatchHandle
from uccl_ep_train.common.shown import shown
from uccl_ep_train.core import autograd
from uccl_ep_train.core.routing import MAX_TOKENS
from uccl_ep_train.core.tensors import check_operand, dtype_name, refused_transform
from uccl_ep_train.errors import ClosedError, DtypeError, InputError, ShapeError
from uccl_ep_train.settings.checks import integer, whole

HAS_EFFECTS = hasattr(library, "EffectType")
"""Of this torch: operators may have an effect, which keeps them in their order."""

_tickets = itertools.count(1)
_numbers = itertools.count(1)
_number_of: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()
_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
_plans: dict[int, tuple[StorageWeakRef, DispatchHandle]] = {}
_lock = threading.Lock()


class DispatchedRows(NamedTuple):
    """What `Operators.dispatch` returns.

    rows               [C, H], dtype of x: as `DispatchResult.rows`; unused rows are zeros
    row_weights        [C] float32, zero in unused rows and padding
    tokens_per_expert  [L] int64 on the device of x: rows of each local expert, padding included; not cut by
                       the capacity
    overflow           bool []: more rows came than the capacity, and the rest was dropped
    ticket             [1] int64: of the plan, for `combine` and `dispatch_again`
    """

    rows: Tensor
    row_weights: Tensor
    tokens_per_expert: Tensor
    overflow: Tensor
    ticket: Tensor


class Operators:
    """The operators of one buffer, with one capacity.

    buffer            outlives the calls. Graphs hold its number only: it is the how many-th of the process to
                      get operators. A program that loads an exported one makes them in the same order
    capacity          C, 1 .. 2^31 - 1: rows of every dispatch's output; may differ per rank
    expert_alignment  rows; each expert's segment is padded to a multiple of it
    max_tokens        as of `Buffer.dispatch`
    dispatch_dtype    "fp8" | "bf16"; None: the configuration's

    Calls are differentiable and raise what those of `Buffer` raise. Raises `DtypeError`, `InputError`.
    """

    def __init__(
        self,
        buffer: Buffer,
        *,
        capacity: int,
        expert_alignment: int = 1,
        dispatch_dtype: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if not isinstance(buffer, Buffer):
            raise DtypeError(f"buffer is {type(buffer).__name__}; allowed is a Buffer")
        if not HAS_EFFECTS:
            raise InputError(f"torch {torch.__version__} does not keep operators in order; 2.11 does")
        capacity = _checked("capacity", capacity, (1 << 31) - 1)
        expert_alignment = _checked("expert_alignment", expert_alignment, 1 << 20)
        max_tokens = None if max_tokens is None else _checked("max_tokens", max_tokens, MAX_TOKENS)
        if dispatch_dtype not in (None, "fp8", "bf16", "fp8_pow2", "fp8_fp32"):
            raise InputError(f"dispatch_dtype = {shown(dispatch_dtype)}; allowed is 'fp8' | 'bf16'")
        self.buffer = _number(buffer)
        self.capacity = capacity
        self.expert_alignment = expert_alignment
        self.max_tokens = max_tokens
        self.dispatch_dtype = dispatch_dtype or buffer.config.wire.dispatch_dtype
        self.grad_dtype = buffer.config.wire.grad_dtype

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> DispatchedRows:
        """x [T, H], topk_idx [T, K] int64, topk_weights [T, K] float32: as `Buffer.dispatch` takes them."""
        _check_kinds(self.buffer, "dispatch", x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        how = (self.buffer, self.capacity, self.expert_alignment, self.dispatch_dtype, self.max_tokens)
        return DispatchedRows(*torch.ops.uccl_ep.dispatch(x, topk_idx, topk_weights, *how))

    def dispatch_again(self, x: Tensor, ticket: Tensor) -> Tensor:
        """Other rows x [T, H] by the routing of an earlier dispatch: [C, H]."""
        _check_kinds(self.buffer, "dispatch", x=x, ticket=ticket)
        how = (self.buffer, self.capacity, self.dispatch_dtype, self.grad_dtype)
        out: Tensor = torch.ops.uccl_ep.dispatch_again(x, ticket, *how)
        return out

    def combine(self, rows: Tensor, ticket: Tensor, num_tokens: int) -> Tensor:
        """rows [C, H] of the dispatch with this ticket, num_tokens T: the sums [T, H]."""
        _check_kinds(self.buffer, "combine", rows=rows, ticket=ticket, num_tokens=num_tokens)
        if not isinstance(num_tokens, int | torch.SymInt):
            num_tokens = whole(num_tokens)
        how = (self.buffer, num_tokens, self.capacity, self.grad_dtype)
        out: Tensor = torch.ops.uccl_ep.combine(rows, ticket, *how)
        return out


def _number(buffer: Buffer) -> int:
    """One of each buffer: layers with operators of their own share what is compiled."""
    with _lock:
        if buffer not in _number_of:
            _number_of[buffer] = number = next(_numbers)
            _buffers[number] = buffer
        return _number_of[buffer]


def _buffer_of(number: int) -> Buffer:
    buffer = _buffers.get(int(number))  # torch.compile may take another one for a symbol
    if buffer is None:
        raise ClosedError(f"buffer {number} of these operators is gone")
    return buffer


def _check_kinds(number: int, what: str, **given: Any) -> None:
    """Torch refuses other kinds before an operator runs, and outside graphs such a call would not count."""
    if torch.compiler.is_compiling():
        if refused := refused_transform():
            raise InputError(refused)
        return
    with _buffer_of(number).preparing(what):
        if refused := refused_transform():
            raise InputError(refused)
        for name, value in given.items():
            kind: type = int if name == "num_tokens" else Tensor
            if not (_is_whole(value) if kind is int else isinstance(value, kind)):
                raise DtypeError(f"{name} is {type(value).__name__}; allowed is {kind.__name__}")
            if kind is Tensor:
                check_operand(name, value)


def _is_whole(value: object) -> bool:
    try:
        return isinstance(value, torch.SymInt) or whole(value) < 1 << 63
    except TypeError:
        return False


def _checked(name: str, value: object, most: int) -> int:
    try:
        return integer(1, most).check(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} = {shown(value)}; allowed is 1 .. {most}") from None


def _plan_of(ticket: Tensor) -> DispatchHandle:
    if ticket.numel() != 1 or ticket.dtype != torch.int64:
        raise InputError(
            f"ticket is {list(ticket.shape)} {dtype_name(ticket)}; allowed is that of a dispatch"
        )
    number = int(ticket)
    with _lock:
        entry = _plans.get(number)
    if entry is None:
        raise InputError(f"ticket {number}: its dispatch's ticket is gone; keep that tensor, not a copy")
    return entry[1]


def _prepared(
    owner: Buffer, what: str, ticket: Tensor, rows: Tensor, said: tuple[str, int]
) -> tuple[DispatchHandle, Tensor]:
    """The ticket's plan, and rows as an engine takes them. said: "capacity" or "num_tokens" of the plan."""
    name, number = said
    with owner.preparing(what), torch.no_grad():
        handle = _plan_of(ticket)
        had = handle.num_rows if name == "capacity" else handle.num_tokens
        if had != number:
            raise ShapeError(f"{name} = {number}: the ticket's dispatch had {had}")
        return handle, autograd.plain(rows)


def _issue(handle: DispatchHandle) -> Tensor:
    """A ticket for a plan; plans whose tickets are gone go."""
    number = next(_tickets)
    ticket = torch.tensor([number], dtype=torch.int64)
    with _lock:
        for old in [old for old, (storage, _) in _plans.items() if storage.expired()]:
            del _plans[old]
        _plans[number] = (StorageWeakRef(ticket.untyped_storage()), handle)
    return ticket


def _saves(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = operator.namespace == "uccl_ep"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def keep_calls() -> tuple[Any, Any]:
    """The `context_fn` of a `torch.utils.checkpoint(use_reentrant=False)` inside of what is compiled.

    Results of these operators are saved, and all else is computed again. Torch cannot compile a checkpoint
    that repeats them.
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_saves)
    return contexts


def num_plans() -> int:
    """Plans that tickets keep alive."""
    with _lock:
        return sum(not storage.expired() for storage, _ in _plans.values())


# ---- the operators. Numbers name buffers, as a graph holds nothing else of them. ---------------------


@library.custom_op("uccl_ep::dispatch", mutates_args=())
def _dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: int,
    capacity: int,
    alignment: int,
    wire: str,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    owner = _buffer_of(buffer)
    with owner.preparing("dispatch"), torch.no_grad():
        given = autograd.plain(x), topk_idx.contiguous(), topk_weights.contiguous()
    with torch.no_grad():
        got = owner.dispatch(
            *given,
            expert_alignment=alignment,
            dispatch_dtype=wire,  # type: ignore[arg-type]
            capacity=capacity,
            pad_to_capacity=True,
            max_tokens=max_tokens,
        )
    assert got.row_weights is not None and got.overflow is not None
    # On a GPU both lie in the plan's memory, and an operator's outputs must share none.
    counts, overflow = got.tokens_per_expert.to(x.device, copy=True), got.overflow.clone()
    return got.rows, got.row_weights, counts, overflow, _issue(got.handle)


@_dispatch.register_fake
def _(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: int, capacity: int, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    owner = _buffer_of(buffer)
    local = owner.config.num_experts // owner.num_ranks
    return (
        x.new_empty((capacity, x.shape[1])),
        x.new_empty((capacity,), dtype=torch.float32),
        x.new_empty((local,), dtype=torch.int64),
        x.new_empty((), dtype=torch.bool),
        torch.empty((1,), dtype=torch.int64),
    )


@library.custom_op("uccl_ep::dispatch_again", mutates_args=())
def _dispatch_again(
    x: Tensor, ticket: Tensor, buffer: int, capacity: int, wire: str, grad_wire: str
) -> Tensor:
    owner = _buffer_of(buffer)
    handle, plain = _prepared(owner, "dispatch", ticket, x, ("capacity", capacity))
    with torch.no_grad():
        return owner.dispatch(plain, handle=handle, dispatch_dtype=wire).rows  # type: ignore[arg-type]


@_dispatch_again.register_fake
def _(x: Tensor, ticket: Tensor, buffer: int, capacity: int, wire: str, grad_wire: str) -> Tensor:
    return x.new_empty((capacity, x.shape[1]))


@library.custom_op("uccl_ep::combine", mutates_args=())
def _combine(
    rows: Tensor, ticket: Tensor, buffer: int, num_tokens: int, capacity: int, grad_wire: str
) -> Tensor:
    owner = _buffer_of(buffer)
    handle, plain = _prepared(owner, "combine", ticket, rows, ("num_tokens", num_tokens))
    with torch.no_grad():
        return owner.combine(plain, handle)


@_combine.register_fake
def _(rows: Tensor, ticket: Tensor, buffer: int, num_tokens: int, capacity: int, grad_wire: str) -> Tensor:
    return rows.new_empty((num_tokens, rows.shape[1]))


@library.custom_op("uccl_ep::combine_with_weights", mutates_args=())
def _combine_with_weights(
    rows: Tensor, row_weights: Tensor, ticket: Tensor, buffer: int, num_tokens: int, width: int
) -> tuple[Tensor, Tensor]:
    """The backward of a dispatch: weights [C] go back to their pairs, [T, K]."""
    owner = _buffer_of(buffer)
    with owner.preparing("combine"):
        handle = _plan_of(ticket)
    with torch.no_grad():
        values: Tensor | None
        out, values = owner.combine_gradients(handle)(rows, row_weights)
    assert values is not None
    return out, values


@_combine_with_weights.register_fake
def _(
    rows: Tensor, row_weights: Tensor, ticket: Tensor, buffer: int, num_tokens: int, width: int
) -> tuple[Tensor, Tensor]:
    return rows.new_empty((num_tokens, rows.shape[1])), row_weights.new_empty((num_tokens, width))


# ---- their gradients ----------------------------------------------------------------------------------


def _save_ticket(ctx: Any, ticket: Tensor) -> None:
    ctx.save_for_backward(ticket)
    ctx.kept = ticket.detach()  # hooks of saved tensors may give a copy back


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, topk_idx, _, ctx.buffer, *_ = inputs
    _save_ticket(ctx, output[4])
    ctx.tokens, ctx.width = topk_idx.shape


def _of_dispatch(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, *_: Any) -> tuple[Any, ...]:
    (ticket,) = ctx.saved_tensors
    how = (ticket, ctx.buffer, ctx.tokens, ctx.width)
    x, values = torch.ops.uccl_ep.combine_with_weights(grad_rows, grad_weights, *how)
    return x, None, values, None, None, None, None, None


_dispatch.register_autograd(_of_dispatch, setup_context=_keep_dispatch)


def _keep_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ticket, ctx.buffer, ctx.capacity, _, ctx.grad_wire = inputs
    ctx.tokens = x.shape[0]
    _save_ticket(ctx, ticket)


def _of_again(ctx: Any, grad_rows: Tensor) -> tuple[Any, ...]:
    (ticket,) = ctx.saved_tensors
    how = (ticket, ctx.buffer, ctx.tokens, ctx.capacity, ctx.grad_wire)
    return torch.ops.uccl_ep.combine(grad_rows, *how), None, None, None, None, None


_dispatch_again.register_autograd(_of_again, setup_context=_keep_again)


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ticket, ctx.buffer, _, ctx.capacity, ctx.grad_wire = inputs
    _save_ticket(ctx, ticket)


def _of_combine(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    (ticket,) = ctx.saved_tensors
    how = (ticket, ctx.buffer, ctx.capacity, ctx.grad_wire, ctx.grad_wire)
    return torch.ops.uccl_ep.dispatch_again(grad_out, *how), None, None, None, None, None


_combine.register_autograd(_of_combine, setup_context=_keep_combine)
_combine_with_weights.register_autograd(autograd.refuse_second)

# Ranks compile graphs of their own. Without an effect a compiler moves an operator, or drops one whose result
# is empty: on one rank and not on the others.
if HAS_EFFECTS:
    for _operator in (_dispatch, _dispatch_again, _combine, _combine_with_weights):
        _operator.register_effect(library.EffectType.ORDERED)
