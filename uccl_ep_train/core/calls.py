"""The checked arguments of a `Buffer`'s calls, and the handling of calls that raise.

Shapes: T tokens of this rank, H hidden, R rows received by this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from uccl_ep_train.common.handle import DispatchHandle, Fp8Rows, RowLayout
from uccl_ep_train.common.shown import shown
from uccl_ep_train.common.uncopied import Uncopied
from uccl_ep_train.core import autograd, routing
from uccl_ep_train.core.tensors import check_mode, check_tensor
from uccl_ep_train.errors import ClosedError, CommunicationError, EpError, InputError, told
from uccl_ep_train.settings.config import EpConfig

Bias = Tensor | Sequence[Tensor]
"""One tensor [T, H] in the dtype of a combine's rows, or up to two of them."""


class Queue(Protocol):
    """The target of calls: a launcher."""

    def num_calls(self) -> int: ...

    def refuse(self, why: str) -> None: ...

    def fail(self, why: str) -> None: ...


class Call(Uncopied):
    """A call until it is queued. An error in it either counts as the call, or fails all ranks.

    Operations pair up by their order. A rank that raises before its operation is queued, and continues, is
    one call ahead: its next call must not pair with the others' current one. After it is queued, peers rely
    on it, so they must learn if this rank cannot continue.
    """

    __slots__ = ("_num_calls", "_queue", "_what")

    def __init__(self, queue: Queue, what: str) -> None:
        self._queue = queue
        self._what = what

    def __enter__(self) -> None:
        self._num_calls = self._queue.num_calls()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (ClosedError, CommunicationError)):
            return
        if self._queue.num_calls() == self._num_calls:
            self._queue.refuse(told(error))
        elif not isinstance(error, EpError):
            self._queue.fail(f"{self._what} was given up by {told(error)}")


class DispatchCall(NamedTuple):
    """A checked dispatch.

    x         [T, H], or its codes
    routed    "plan": the handle's routing is used
    handle    None: a new plan is made
    wire      "fp8" | "mxfp8" | "bf16"
    scale     of "fp8", "pow2" | "fp32"
    fp8_rows  rows are returned as codes and scales
    attach    the results belong on the autograd graph
    scales    [T, ceil(H / 128)] of x, if it has codes; with "mxfp8" words of exponents, taken as float32
    packs     scales came as exponents, and are returned so
    place     among autograd's nodes, of a call that was launched before its result is attached; or None
    metadata  [T, M], or None
    """

    x: Tensor
    routed: routing.Routing
    handle: DispatchHandle | None
    rows: RowLayout
    wire: str
    scale: str
    fp8_rows: bool = False
    attach: bool = False
    scales: Tensor | None = None
    metadata: Tensor | None = None
    packs: bool = False
    place: int | None = None

    def placed(self) -> DispatchCall:
        return self._replace(place=autograd.place_now()) if self.attach else self


class CombineCall(NamedTuple):
    """A checked combine.

    rows         [R, H]
    bias         [T, H] each, at most two: the first addends
    wire_fp32    sums of BF16 rows travel in fp32
    rounds_sums  what a domain returns to another is rounded to BF16; only of rows in fp32, on CPUs
    grad_wire    how gradients of the result travel, "fp8" | "bf16"; None: the result has none
    place        as of `DispatchCall`
    """

    rows: Tensor
    handle: DispatchHandle
    bias: tuple[Tensor, ...]
    wire_fp32: bool
    rounds_sums: bool
    grad_wire: str | None
    place: int | None = None

    def placed(self) -> CombineCall:
        return self if self.grad_wire is None else self._replace(place=autograd.place_now())


@dataclass(frozen=True)
class Checks:
    """Checks the arguments of a buffer's calls. Its methods raise `InputError`.

    device         where tensors must lie
    owner          of the buffer's handles
    local_experts  of this rank
    """

    config: EpConfig
    device: torch.device
    owner: object
    local_experts: int

    def dispatch(
        self,
        x: Tensor | Fp8Rows,
        given: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        handle: DispatchHandle | None,
        asked: RowLayout,
        dtypes: tuple[str | None, str | None],
        metadata: Tensor | None,
    ) -> DispatchCall:
        """given: topk_idx, topk_weights, routing_map, probs; dtypes: of the wire and of the output."""
        check_mode()
        wire, output_dtype = dtypes
        scales, scale = None, ""
        packs = isinstance(x, Fp8Rows) and getattr(x.scales, "dtype", None) == torch.int32
        if isinstance(x, Fp8Rows):
            x, scales, known = routing.check_codes(x, self.config, self.device)
            wire = known if wire in (None, "fp8") else wire
            packs, output_dtype = packs and wire == "fp8", output_dtype or "fp8"
            scale = "fp32" if wire == "fp8" else ""
        else:
            wire = self.config.wire.dispatch_dtype if wire is None else wire
            wire, scale = routing.split_wire(wire, self.config.wire.fp8_scale)
            routing.check_rows("x", x, self.config, self.device)
            routing.check_wire("x", x, "dispatch_dtype", wire)
        if metadata is not None:
            routing.check_metadata(metadata, x)
        if handle is not None:
            routing.check_handle(handle, self.owner)
        routed = routing.check_routing(x, *given, handle, self.config.num_experts)
        if asked.compact:
            asked = asked._replace(width=min(routed.width, self.local_experts))
        rows = routing.check_layout(asked, handle)
        fp8_rows = routing.check_output(output_dtype, wire)
        attach = autograd.needs_graph(x, routed.values) and not fp8_rows
        return DispatchCall(x, routed, handle, rows, wire, scale, fp8_rows, attach, scales, metadata, packs)

    def gradients_of_combine(self, grad_out_TH: Tensor, handle: DispatchHandle, wire: str) -> DispatchCall:
        """The dispatch that is a combine's backward."""
        grad_out_TH = autograd.plain(grad_out_TH)
        check_tensor("the gradient", grad_out_TH, 2, self.device)
        return DispatchCall(
            grad_out_TH, routing.PLANNED, handle, handle.row_layout, wire, self.config.wire.fp8_scale
        )

    def gradients_of_dispatch(
        self, rows: Tensor, weights: Tensor | None, handle: DispatchHandle, bias: Bias
    ) -> tuple[CombineCall, Tensor | None]:
        """The combine that is a dispatch's backward, and the weights' gradients as it takes them."""
        weights = autograd.plain(weights)
        if weights is not None:
            check_tensor("the gradient of row_weights", weights, weights.dim(), self.device)
        return self.combine(autograd.plain(rows), handle, bias), weights

    def combine(
        self,
        rows: Tensor,
        handle: DispatchHandle,
        bias: Bias = (),
        grad_dtype: str | None = None,
        rounds_sums: bool = False,
    ) -> CombineCall:
        check_mode()
        routing.check_handle(handle, self.owner)
        routing.check_combine_rows(rows, handle, self.config, self.device)
        biases = routing.check_bias(bias, rows, handle, self.config)
        if not isinstance(rounds_sums, bool):
            raise InputError(f"rounds_sums = {shown(rounds_sums)}; allowed is True | False")
        grad_wire = self.config.wire.grad_dtype if grad_dtype is None else grad_dtype
        attach = autograd.needs_graph(rows, *biases)
        if attach or grad_dtype is not None:
            routing.check_wire("rows", rows, "grad_dtype", grad_wire)
        wire_fp32 = self.config.wire.combine_wire_dtype == "fp32"
        return CombineCall(rows, handle, biases, wire_fp32, rounds_sums, grad_wire if attach else None)
