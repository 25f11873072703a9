"""Turns checked tensors into native operations.

The same two operations serve forward and backward: gradients of a combine are dispatched on the saved plan,
gradients of a dispatch are combined.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uccl_ep_train.common.exponents import pack_exponents
from uccl_ep_train.common.handle import DispatchHandle, Fp8Rows
from uccl_ep_train.core.calls import CombineCall, DispatchCall
from uccl_ep_train.core.native import RowFormat, load_native, row_format
from uccl_ep_train.core.pending import InFlight, Record
from uccl_ep_train.core.routing import MAX_BIASES

# What is the host's stays there, whatever torch.set_default_device says.
_HOST = torch.device("cpu")

_NO_BIASES = (0,) * MAX_BIASES

# A tensor without elements has address 0, which the native core reads as "not given".
_NOTHING = ctypes.create_string_buffer(64)


def address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    begin = tensor.data_ptr()
    if begin == 0:
        if tensor.numel() > 0:  # of inputs this is checked before
            raise RuntimeError(f"a {type(tensor).__name__} of shape {list(tensor.shape)} has no memory")
        return ctypes.addressof(_NOTHING)
    return begin


class Outputs(NamedTuple):
    """Tensors that a dispatch writes; `scales` with FP8 codes as rows, `row_experts` for compact rows,
    `metadata` if it travels.
    """

    rows: Tensor
    scales: Tensor | None
    row_weights: Tensor | None
    row_experts: Tensor | None
    metadata: Tensor | None

    def like(self, num_rows: int) -> Outputs:
        """Others, of so many rows."""

        def like(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.new_empty(num_rows, *tensor.shape[1:])

        rows = like(self.rows)
        assert rows is not None
        return Outputs(rows, *map(like, self[1:]))

    def pad(self, first: int) -> None:
        """The rows from `first` on become padding."""
        for tensor, value in zip(self, (0, 1, 0, -1, 0), strict=True):
            if tensor is not None:
                tensor[first:].fill_(value)

    def shrinking(self) -> Callable[[int], None]:
        """Makes them shorter, in place, when it is called with a number of rows. Memory stays what it is."""
        resizing = [(tensor.resize_, tensor.shape[1:]) for tensor in self if tensor is not None]

        def shrink(num_rows: int) -> None:
            for resize, row in resizing:
                resize(num_rows, *row)

        return shrink


Receive = Callable[[int], Outputs]


@dataclass
class Dispatched:
    """A launched dispatch: `outputs` are being written until `native.wait()` returned, then `settle()`.

    received           what the engine writes; other tensors than `outputs` where more came than the capacity
                       holds
    counts             [L] int64: tokens_per_expert, if it is not the handle's
    overflow           bool [], as the result has it
    """

    native: Any
    handle: DispatchHandle
    received: Outputs
    outputs: Outputs
    counts: Tensor | None = None
    overflow: Tensor | None = None

    def rows_of(self, call: DispatchCall) -> Tensor | Fp8Rows:
        """As the result has them."""
        rows, scales = self.outputs[:2]
        if scales is None:
            return rows
        if call.wire == "mxfp8":
            return Fp8Rows(rows, scales.view(torch.int32))
        return Fp8Rows(rows, pack_exponents(scales) if call.packs else scales)

    @property
    def tokens_per_expert(self) -> Tensor:
        """[L] int64, as the result has it."""
        if self.counts is None:
            self.counts = self.handle.counts.clone()
        return self.counts

    def settle(self) -> None:
        """The work that remains when the engine is done."""
        if self.outputs is self.received:
            return
        for kept, received in zip(self.outputs, self.received, strict=True):
            if kept is not None and received is not None and kept is not received:
                kept.copy_(received[: len(kept)])


class Combined(NamedTuple):
    """A launched combine: `out` and `values` are being written until `native.wait()` returned."""

    native: Any
    out: Tensor
    values: Tensor | None

    def settle(self) -> None:
        """Nothing remains to be done."""


class Launcher:
    """Launches on one engine of the host backend, and keeps what the engine touches alive.

    engine     native engine
    in_flight  records the tensors of unfinished operations
    owner      marks the handles of this engine
    """

    def __init__(self, engine: Any, in_flight: InFlight, owner: object) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._owner = owner
        self._core = load_native()

    def dispatch(self, call: DispatchCall, *, aside: bool) -> Dispatched:
        """Returns when the counts are known, if needed, and the outputs have their sizes.

        aside  on a GPU: beside the caller's stream
        """
        x_TH, routed, handle, rows = call.x, call.routed, call.handle, call.rows
        args = self._dispatch_args(call, aside)
        codes = row_format(call.wire, call.scale) if call.fp8_rows else None
        native = self._engine.dispatch(args, None if handle is None else handle.plan, self._stream())
        record = self._track(native, aside, x_TH, call.scales, call.metadata, routed.indices, routed.values)
        known = handle or DispatchHandle(plan=native.plan, owner=self._owner, row_layout=rows)

        def receive(num_rows: int) -> Outputs:
            received = _allocate(call, codes, num_rows)
            if handle is None:
                known.keep(self._plan_memory(native))
            record.keep(known.storage, *received)
            native.set_output([*map(address, (*received, known.storage))], self._stream())
            return received

        return self._receive(native, known, receive)

    def _dispatch_args(self, call: DispatchCall, aside: bool) -> Any:
        x_TH, routed, handle, rows = call.x, call.routed, call.handle, call.rows
        num_tokens, hidden = x_TH.shape
        width = routed.width if routed.indices is not None or handle is None else handle.routing_width
        # In the order of the fields: by their names it takes three times as long.
        return self._core.DispatchArgs(
            address(x_TH),
            address(call.scales),
            address(call.metadata),
            num_tokens,
            hidden,
            0 if call.metadata is None else call.metadata.shape[1],
            x_TH.element_size(),
            "same" if call.wire == "bf16" else call.wire,
            call.scale,
            routed.kind,
            address(routed.indices),
            width,
            address(routed.values),
            rows.alignment,
            rows.compact,
            -1 if rows.capacity is None else rows.capacity,
            rows.pad_to_capacity,
            rows.max_tokens or 0,
            aside,
        )

    def combine(
        self, call: CombineCall, *, row_values: Tensor | None = None, aside: bool = False
    ) -> Combined:
        """`row_values` [R] fp32 (compact: [R, W]) go back to their pairs: `values`, shaped as the routing.

        Rows that a capacity dropped add nothing.
        """
        handle, bias = call.handle, call.bias
        rows_RH = self._with_dropped(call.rows, handle)
        row_values = None if row_values is None else self._with_dropped(row_values, handle)
        out_TH = rows_RH.new_empty(handle.num_tokens, rows_RH.shape[1])
        values = None
        if row_values is not None:
            values = row_values.new_zeros(handle.num_tokens, handle.routing_width)
        args = self._core.CombineArgs(
            address(rows_RH),
            rows_RH.shape[1],
            rows_RH.element_size(),
            call.wire_fp32,
            call.rounds_sums,
            address(row_values),
            (*map(address, bias), *_NO_BIASES[len(bias) :]),
            address(out_TH),
            address(values),
            aside,
        )
        native = self._engine.combine(args, handle.plan, self._stream())
        self._track(native, aside, handle.storage, rows_RH, row_values, out_TH, values, *bias)
        return Combined(native, out_TH, values)

    def num_calls(self) -> int:
        """Number of queued operations plus refused calls on this rank."""
        return int(self._engine.num_calls())

    def fail(self, why: str) -> None:
        """This rank cannot continue: every rank raises."""
        self._engine.fail(why)

    def wait(self, launched: Dispatched | Combined) -> None:
        """Returns when the caller's stream may use the outputs."""
        self.wait_native(launched.native)
        launched.settle()

    def wait_native(self, native: Any) -> None:
        """The engine's part of `wait`. Raises what the operation failed with."""
        native.wait(self._stream())

    def finish(self, launched: Dispatched | Combined) -> None:
        """`wait` for an operation that was not launched aside."""
        self.wait(launched)

    def refuse(self, why: str) -> None:
        """A refused call counts as a call after the queued ones."""
        self._engine.refused(why, self._stream())

    # What differs between backends.

    def _stream(self) -> int:
        """The caller's, as the engine takes it; 0: there is none."""
        return 0

    def _track(self, native: Any, aside: bool, *tensors: Tensor | None) -> Record:
        """Keeps tensors alive until the engine is done with them."""
        return self._in_flight.add(native, *tensors)

    def _receive(self, native: Any, handle: DispatchHandle, receive: Receive) -> Dispatched:
        """Calls receive(num_rows), which allocates outputs for so many rows and gives them to the engine."""
        native.wait_counts()  # of a new plan
        num_rows, capacity = native.plan.num_rows, handle.capacity
        received = receive(max(num_rows, capacity or 0))
        if handle.pad_to_capacity:
            received.pad(num_rows)  # no row that comes is there
        tokens_per_expert = torch.tensor(native.plan.tokens_per_expert, dtype=torch.int64, device=_HOST)
        launched = Dispatched(native, handle, received, received, tokens_per_expert)
        if capacity is not None:
            launched.overflow = torch.tensor(num_rows > capacity, device=_HOST)
            if capacity < num_rows:
                launched.outputs = received.like(capacity)
        return launched

    def _plan_memory(self, native: Any) -> Tensor | None:
        """Of a new plan, where it is not the engine's own."""
        return None

    def _with_dropped(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """All rows of the plan (or a value of each): zeros in the place of those that a capacity dropped."""
        if handle.capacity is None or handle.plan.num_rows <= handle.capacity:
            return rows
        num_dropped = handle.plan.num_rows - handle.capacity
        return torch.cat([rows, rows.new_zeros(num_dropped, *rows.shape[1:])])


def _allocate(call: DispatchCall, codes: RowFormat | None, num_rows: int) -> Outputs:
    """Memory for `num_rows` rows like those of x, on its device, or for codes and scales of a format."""
    x_TH, rows, metadata = call.x, call.rows, call.metadata
    hidden = x_TH.shape[1]
    shape = rows.weights_shape(num_rows)
    return Outputs(
        x_TH.new_empty((num_rows, hidden), dtype=torch.float8_e4m3fn if codes else x_TH.dtype),
        x_TH.new_empty((num_rows, codes.num_scales(hidden)), dtype=torch.float32) if codes else None,
        x_TH.new_empty(shape, dtype=torch.float32) if call.routed.values is not None else None,
        x_TH.new_empty(shape, dtype=torch.int64) if rows.compact else None,
        None if metadata is None else metadata.new_empty(num_rows, metadata.shape[1]),
    )
