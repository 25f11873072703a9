"""The low-latency calls of one native engine.

Shapes: T tokens of this rank, M the most tokens of any rank, R ranks, H hidden, K experts per token, L
experts of this rank, S = R * M slots of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.slots import SlotHandle, SlotRows, SlotStatistics
from uccl_ep_train.core.native import load_native
from uccl_ep_train.core.operations import address
from uccl_ep_train.settings.checks import FP8_BLOCK


class SlotWire(NamedTuple):
    """How rows travel: "bf16" | "fp8", with scales "" | "pow2" | "fp32", which come as UE8M0 words or not."""

    name: str
    scale: str
    ue8m0: bool


@dataclass(frozen=True)
class SlotEngine:
    """num_ranks R, num_experts L, max_tokens M; wire_fp32: sums travel in fp32."""

    engine: Any
    device: torch.device
    num_ranks: int
    num_experts: int
    max_tokens: int
    wire_fp32: bool

    def new_rows(
        self, x: Tensor, routing: tuple[Tensor, Tensor | None], wire: SlotWire, owner: object
    ) -> SlotRows:
        """Memory for what a dispatch brings, with nothing in it. The handle's plan is int32: origins [L, S],
        then pairs [R, M, K], then weights [R, M, K] if they travel. routing: topk_idx, topk_weights or None
        """

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        experts, slots = self.num_experts, self.num_ranks * self.max_tokens
        topk_idx, topk_weights = routing
        (num_tokens, hidden), num_topk = x.shape, topk_idx.shape[1]
        of_slot = experts + num_topk * (1 if topk_weights is None else 2)
        rows: Tensor | Fp8Rows
        if wire.name == "fp8":
            blocks = -(-hidden // FP8_BLOCK)
            words = -(-blocks // 4) if wire.ue8m0 else blocks
            scales = empty(experts, words, slots, dtype=torch.int32 if wire.ue8m0 else torch.float32)
            codes = empty(experts, slots, hidden, dtype=torch.float8_e4m3fn)
            rows = Fp8Rows(codes, scales.transpose(1, 2))
        else:
            rows = empty(experts, slots, hidden, dtype=torch.bfloat16)
        handle = SlotHandle(
            source_tokens=empty(experts, slots),
            ranges=empty(experts, self.num_ranks, dtype=torch.int64),
            counts=empty(experts),
            max_tokens=self.max_tokens,
            hidden=hidden,
            num_tokens=num_tokens,
            num_topk=num_topk,
            routing=None if topk_weights is None else (topk_idx, topk_weights),
            plan=empty(slots * of_slot),
            owner=owner,
        )
        return SlotRows(rows, handle.counts, handle)

    def dispatch_args(
        self, x: Tensor, topk_idx: Tensor, wire: SlotWire, into: SlotRows, statistics: SlotStatistics
    ) -> Any:
        rows, scales = into.rows if isinstance(into.rows, Fp8Rows) else (into.rows, None)
        handle = into.handle
        out = map(address, (rows, scales, handle.counts, handle.ranges, handle.source_tokens))
        counted = map(address, statistics)
        return load_native().LowLatencyDispatch(
            address(x),
            address(topk_idx),
            address(None if handle.routing is None else handle.routing[1]),
            x.shape[0],
            topk_idx.shape[1],
            x.shape[1],
            wire.name,
            wire.scale,
            wire.ue8m0,
            [*out, *self._plan(handle, knows=handle.routing is not None), *counted],
        )

    def combine_args(
        self,
        rows: Tensor,
        handle: SlotHandle,
        routing: tuple[Tensor, Tensor] | None,
        out: Tensor,
        waited_ns: Tensor | None,
    ) -> Any:
        """routing: topk_idx, topk_weights. None: those of the dispatch"""
        told = routing or handle.routing
        assert told is not None
        memory = [address(rows), address(handle.ranges), *self._plan(handle, knows=routing is None)]
        memory += map(address, (*told, out, waited_ns))
        tokens, width = told[0].shape
        return load_native().LowLatencyCombine(memory, tokens, width, rows.shape[2], self.wire_fp32)

    def dispatch(self, args: Any, phase: str) -> None:
        """phase: "both" | "send" | "receive". On the current stream; on CPUs it returns when it is over."""
        self.engine.low_latency_dispatch(args, phase, self._stream())

    def combine(self, args: Any, phase: str) -> None:
        self.engine.low_latency_combine(args, phase, self._stream())

    def masks(self) -> Tensor:
        """[R] int32: 1 for each rank that is masked, when the current stream gets there."""
        out = torch.empty(self.num_ranks, dtype=torch.int32, device=self.device)
        self.engine.low_latency_masks(address(out), self._stream())
        return out

    def captured_graph(self) -> int:
        """Which graph the current stream is captured into; 0: none."""
        return 0 if self.device.type == "cpu" else int(self.engine.captured_graph(self._stream()))

    def _plan(self, handle: SlotHandle, *, knows: bool) -> tuple[int, int, int]:
        """Addresses of origins, pairs and weights; knows: else there are no weights, which is 0"""
        assert isinstance(handle.plan, Tensor)
        begin, of_slot = address(handle.plan), handle.plan.itemsize * self.num_ranks * self.max_tokens
        pairs = begin + of_slot * self.num_experts
        return begin, pairs, pairs + of_slot * handle.num_topk if knows else 0

    def _stream(self) -> int:
        return 0 if self.device.type == "cpu" else int(torch._C._cuda_getCurrentRawStream(self.device.index))
