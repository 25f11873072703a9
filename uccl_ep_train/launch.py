"""Turns checked tensors into native operations.

The same two operations serve forward and backward: gradients of a combine are dispatched on the saved plan,
gradients of a dispatch are combined.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uccl_ep_train.errors import EpError
from uccl_ep_train.fp8 import BLOCK
from uccl_ep_train.handle import DispatchHandle, Fp8Rows
from uccl_ep_train.native import load_native
from uccl_ep_train.pending import InFlight
from uccl_ep_train.routing import Routing

# A tensor without elements has address 0, which the native core reads as "not given".
_NOTHING = ctypes.create_string_buffer(64)


def address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    return tensor.data_ptr() or ctypes.addressof(_NOTHING)


@dataclass(frozen=True)
class Dispatched:
    """A launched dispatch: `rows` and `row_weights` are being written until `native.wait()` returned."""

    native: Any
    handle: DispatchHandle
    rows: Tensor | Fp8Rows
    row_weights: Tensor | None


@dataclass(frozen=True)
class Combined:
    """A launched combine: `out` and `values` are being written until `native.wait()` returned."""

    native: Any
    out: Tensor
    values: Tensor | None


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

    def dispatch(
        self,
        x_TH: Tensor,
        routed: Routing,
        handle: DispatchHandle | None,
        *,
        alignment: int = 1,
        wire: str,
        pow2: bool,
        fp8_rows: bool = False,
    ) -> Dispatched:
        """Returns when the counts are known and the outputs allocated."""
        args = self._core.DispatchArgs()
        args.x_ptr = address(x_TH)
        args.num_tokens, args.hidden = x_TH.shape
        args.element_bytes = x_TH.element_size()
        args.wire = "fp8" if wire == "fp8" else "same"
        args.fp8_pow2 = pow2
        args.routing = routed.kind
        args.routing_ptr = address(routed.indices)
        args.routing_width = (
            routed.width if routed.indices is not None or handle is None else handle.routing_width
        )
        args.values_ptr = address(routed.values)
        args.expert_alignment = alignment
        # From the launch on: an interrupt may come as soon as it returns.
        with self._no_way_back("dispatch"):
            native = self._dispatch(args, None if handle is None else handle.plan)
            record = self._in_flight.add(native, x_TH, routed.indices, routed.values)
            native.wait_counts()
            known = handle or self._make_handle(native)
            shape, scales = (native.num_rows, x_TH.shape[1]), None
            rows = x_TH.new_empty(shape, dtype=torch.float8_e4m3fn if fp8_rows else x_TH.dtype)
            if fp8_rows:
                scales = x_TH.new_empty((shape[0], shape[1] // BLOCK), dtype=torch.float32)
            weights_R = None if routed.values is None else routed.values.new_empty(native.num_rows)
            record.keep(known.storage, rows, scales, weights_R)
            self._give_output(native, known, rows, scales, weights_R)
        return Dispatched(native, known, rows if scales is None else Fp8Rows(rows, scales), weights_R)

    def combine(
        self,
        rows_RH: Tensor,
        handle: DispatchHandle,
        *,
        wire_fp32: bool,
        row_values: Tensor | None = None,
    ) -> Combined:
        """`row_values` [R] fp32 go back to the pairs they came from: `values`, shaped as the routing."""
        out_TH = rows_RH.new_empty(handle.num_tokens, rows_RH.shape[1])
        values = None
        if row_values is not None:
            values = row_values.new_zeros(handle.num_tokens, handle.routing_width)
        args = self._core.CombineArgs()
        args.rows_ptr = address(rows_RH)
        args.hidden = rows_RH.shape[1]
        args.element_bytes = rows_RH.element_size()
        args.wire_fp32 = wire_fp32
        args.values_ptr = address(row_values)
        args.out_ptr = address(out_TH)
        args.values_out_ptr = address(values)
        native = self._combine(args, handle.plan)
        self._in_flight.add(native, handle.storage, rows_RH, row_values, out_TH, values)
        return Combined(native, out_TH, values)

    def wait(self, native: Any) -> None:
        """Returns when the operation's outputs may be used."""
        native.wait()

    # What differs between backends.

    def _make_handle(self, native: Any) -> DispatchHandle:
        return DispatchHandle.of_plan(native.plan, self._owner)

    def _dispatch(self, args: Any, plan: Any) -> Any:
        args.plan = plan
        return self._engine.dispatch(args)

    def _give_output(
        self,
        native: Any,
        handle: DispatchHandle,
        rows_RH: Tensor,
        scales: Tensor | None,
        weights_R: Tensor | None,
    ) -> None:
        native.set_output(address(rows_RH), address(weights_R))

    def _combine(self, args: Any, plan: Any) -> Any:
        args.plan = plan
        return self._engine.combine(args)

    @contextmanager
    def _no_way_back(self, what: str) -> Iterator[None]:
        """Peers count on an operation that has been queued: if this rank cannot go on, they must know."""
        try:
            yield
        except EpError:
            raise
        except BaseException as error:
            self._engine.fail(f"{what} was given up by {type(error).__name__}: {error}")
            raise
