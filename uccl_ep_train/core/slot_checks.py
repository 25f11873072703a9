"""Checks the arguments of low-latency calls on the host, before anything is launched.

Shapes: T tokens of this rank, M the most tokens of any rank, R ranks, H hidden, K experts per token, L
experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uccl_ep_train.common.shown import shown
from uccl_ep_train.common.slots import WIRE_NAMES, SlotHandle, SlotStatistics
from uccl_ep_train.core import routing
from uccl_ep_train.core.tensors import check_mode
from uccl_ep_train.errors import DeviceError, DtypeError, InputError, ShapeError
from uccl_ep_train.settings.config import EpConfig


@dataclass(frozen=True)
class SlotChecks:
    """Its methods raise `InputError`.

    device      where tensors must lie
    max_tokens  M
    owner       of the handles
    """

    config: EpConfig
    device: torch.device
    num_ranks: int
    max_tokens: int
    owner: object

    @property
    def num_local(self) -> int:
        """L"""
        return self.config.num_experts // self.num_ranks

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, wire: str, ue8m0: bool
    ) -> None:
        """x is [T, H] bfloat16, topk_idx [T, K] int64, topk_weights [T, K] float32."""
        check_mode()
        routing.check_rows("x", x, self.config, self.device)
        if x.dtype != torch.bfloat16:
            raise DtypeError(f"x is {x.dtype}; allowed is torch.bfloat16")
        if len(x) > self.max_tokens:
            raise ShapeError(f"x has {len(x)} rows; allowed is at most max_tokens = {self.max_tokens}")
        if not isinstance(wire, str) or wire not in WIRE_NAMES:
            raise InputError(f"wire = {shown(wire)}; allowed is {' | '.join(map(repr, WIRE_NAMES))}")
        if not isinstance(ue8m0, bool):
            raise InputError(f"ue8m0 = {shown(ue8m0)}; allowed is True | False")
        if ue8m0 and wire != "fp8":
            raise InputError(f"ue8m0 = True with wire = {wire!r}; allowed is wire = 'fp8'")
        routing.check_routing(x, topk_idx, topk_weights, None, None, None, self.config.num_experts)

    def combine(
        self,
        rows: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: SlotHandle,
        out: Tensor | None,
    ) -> Tensor:
        """rows is [L, R * M, H] bfloat16, topk_weights [T, K] float32. topk_idx and topk_weights may be the
        dispatch's, which is None. Returns out [T, H], or memory.
        """
        check_mode()
        if not isinstance(handle, SlotHandle):
            raise DtypeError(f"handle is {type(handle).__name__}; allowed is the handle of SlotRows")
        if handle.owner is not self.owner:
            raise InputError(
                "the handle comes from another buffer; allowed is a handle of this one's dispatch"
            )
        self._blocks("rows", rows, (self.num_local, self.num_ranks * self.max_tokens, handle.hidden))
        if topk_idx is None and topk_weights is None:
            if handle.routing is None:
                raise InputError("topk_weights = None; allowed is that where the dispatch was given weights")
            topk_idx, topk_weights = handle.routing
        for name, given in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if not isinstance(given, Tensor):
                raise DtypeError(f"{name} is {type(given).__name__}; allowed is a torch.Tensor")
            if tuple(given.shape) != (handle.num_tokens, handle.num_topk):
                allowed = [handle.num_tokens, handle.num_topk]
                raise ShapeError(f"{name} is {list(given.shape)}; allowed is {allowed}, as in the dispatch")
        if out is None:
            out = rows.new_empty(handle.num_tokens, handle.hidden)
        else:
            self._blocks("out", out, (handle.num_tokens, handle.hidden))
        routing.check_routing(out, topk_idx, topk_weights, None, None, None, self.config.num_experts)
        return out

    def statistics(self, given: SlotStatistics) -> None:
        if not isinstance(given, SlotStatistics):
            raise DtypeError(f"statistics is {type(given).__name__}; allowed is SlotStatistics, or None")
        self._counter("total_counts", given.total_counts, self.num_local, torch.int32)
        self._counter("waited_ns", given.waited_ns, self.num_ranks, torch.int64)

    def _counter(self, name: str, given: Tensor | None, length: int, dtype: torch.dtype) -> None:
        if given is None:
            return
        if not isinstance(given, Tensor) or given.dtype != dtype:
            kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise DtypeError(f"{name} is {kind}; allowed is {dtype}")
        if given.device != self.device:
            raise DeviceError(f"{name} is on {given.device}; allowed is {self.device}")
        if given.shape != (length,) or not given.is_contiguous():
            raise ShapeError(
                f"{name} is {list(given.shape)} of strides {given.stride()}; "
                f"allowed is [{length}] of stride 1"
            )

    def _blocks(self, name: str, given: Tensor, shape: tuple[int, ...]) -> None:
        """`given` is bfloat16, contiguous, of this shape, on the device."""
        if not isinstance(given, Tensor):
            raise DtypeError(f"{name} is {type(given).__name__}; allowed is a torch.Tensor")
        if tuple(given.shape) != shape:
            raise ShapeError(f"{name} is {list(given.shape)}; allowed is {list(shape)}")
        if not given.is_contiguous():
            raise ShapeError(f"{name} is not contiguous (strides {given.stride()}); pass {name}.contiguous()")
        routing.check_rows(name, given.view(-1, shape[-1]), self.config, self.device)
        if given.dtype != torch.bfloat16:
            raise DtypeError(f"{name} is {given.dtype}; allowed is torch.bfloat16")
