"""The calls of vLLM and SGLang, in their order and with their arguments; experts are those of deep_ep_dense.

Written from what these files of 2026 call:
  vllm-project/vllm  vllm/distributed/device_communicators/all2all.py
                     vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ht.py
                     vllm/model_executor/layers/fused_moe/topk_weight_and_reduce.py
                     vllm/utils/import_utils.py
  sgl-project/sglang python/sglang/srt/layers/moe/token_dispatcher/deepep.py
                     python/sglang/srt/layers/moe/moe_runner/deep_gemm.py
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.unit.deep_ep_dense import Case, E, H, packed, quantised, unpacked, values
from uccl_ep_train import deep_ep

Rows = Tensor | tuple[Tensor, Tensor]


def imported() -> Any:
    """What `import deep_ep` gives to a program that called `install`. vLLM looks for it before."""
    deep_ep.install()
    assert importlib.util.find_spec("deep_ep") is not None
    return importlib.import_module("deep_ep")


# ---- vLLM


class Prepared(NamedTuple):
    """What vLLM's experts get: rows, scales, tokens of each expert, all experts' numbers, weights."""

    x: Tensor
    scales: Tensor | None
    counts: Tensor
    ids: Tensor
    weights: Tensor


class VllmLayer:
    """The manager of high-throughput buffers, and prepare and finalize.

    Two micro-batches, numbers 0 and 1, overlap: then calls wait for an event before, and do not return early.
    """

    CONFIGURED = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)

    def __init__(self, case: Case, cpu_group: Any) -> None:
        self.case, self.rank, self.module = case, cpu_group.rank(), imported()
        self.module.Buffer.set_num_sms(min(24, 20))
        self.buffer = self.module.Buffer(
            group=cpu_group,
            num_nvl_bytes=1024 * 1024 * 1024,
            num_rdma_bytes=0,
            low_latency_mode=False,
            num_qps_per_rank=1,
            explicitly_destroy=True,
        )
        self.handles: list[Any] = [None, None]
        self.first_expert = self.rank * case.local

    def config(self, of: str) -> Any:
        """None for numbers of ranks that DeepEP has no configuration of."""
        if self.case.ranks not in self.CONFIGURED:
            return None
        return getattr(self.module.Buffer, f"get_{of}_config")(self.case.ranks)

    def prepare_async(
        self, x: Rows, ids: Tensor, weights: Tensor, batch: int | None = None
    ) -> Callable[[], Prepared]:
        """batch: the micro-batch, or None."""
        capture: Callable[[], Any] = self.buffer.capture
        previous = None if batch is None else capture()
        per_rank, per_node, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            topk_idx=ids,
            num_experts=E,
            previous_event=previous,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        rows, local_ids, local_weights, counts, handle, event = self.buffer.dispatch(
            x=x,
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=1,
            config=self.config("dispatch"),
            previous_event=previous,
            async_finish=batch is None,
            allocate_on_comm_stream=False,
        )
        self.handles[batch or 0] = handle

        def receive() -> Prepared:
            if event.event is not None:
                event.current_stream_wait()
            recv_x, scales = rows if isinstance(rows, tuple) else (rows, None)
            elsewhere = E - 1 if self.first_expert == 0 else 0
            all_ids = torch.where(local_ids == -1, elsewhere, local_ids + self.first_expert)
            return Prepared(recv_x, scales, torch.tensor(counts, dtype=torch.int32), all_ids, local_weights)

        return receive

    def experts(self, got: Prepared) -> Tensor:
        """[N * K, H]: the row of each choice, zero for experts of other ranks. [0, H] if nothing came."""
        if got.x.numel() == 0:
            return torch.empty((0, H), dtype=torch.bfloat16)
        expert_map = torch.full((E,), -1)
        expert_map[self.first_expert : self.first_expert + self.case.local] = torch.arange(self.case.local)
        local = expert_map[got.ids]
        assert torch.bincount(local[local >= 0], minlength=self.case.local).tolist() == got.counts.tolist()
        rows = values(got.x, got.scales).unsqueeze(1) * self.case.factors(self.rank)[local.clamp(min=0)]
        return (rows * (local >= 0).unsqueeze(-1)).to(torch.bfloat16).view(-1, H)

    def finalize_async(
        self, fused: Tensor, got: Prepared, batch: int | None = None, *, on_input: bool = False
    ) -> Callable[[], Tensor]:
        """on_input: x was multiplied by weights before. Without a micro-batch the combine returns early."""
        if fused.numel() != 0:
            by_choice = fused.view(*got.ids.shape, -1)
            if not on_input:
                by_choice.mul_(got.weights.view(len(got.ids), -1, 1))
            fused = by_choice.sum(1)
        previous = None if batch is None else self.buffer.capture()
        assert fused.dtype == torch.bfloat16
        combined, _, event = self.buffer.combine(
            x=fused,
            handle=self.handles[batch or 0],
            topk_weights=None,
            config=self.config("combine"),
            previous_event=previous,
            async_finish=batch is None,
            allocate_on_comm_stream=False,
        )
        output = torch.empty_like(combined)

        def receive() -> Tensor:
            if event.event is not None:
                event.current_stream_wait()
            return output.copy_(combined, non_blocking=True)

        return receive


# ---- SGLang

SGLANG_CONFIG = {
    name: {
        "num_sms": 24,
        "num_max_nvl_chunked_send_tokens": 16,
        "num_max_nvl_chunked_recv_tokens": 512,
        "num_max_rdma_chunked_send_tokens": 16,
        "num_max_rdma_chunked_recv_tokens": 512,
    }
    for name in ("normal_dispatch", "normal_combine")
}


class SglangSettings(NamedTuple):
    """config: of --deepep-config, or None. rows: "bf16", "fp8", or "ue8m0" for GPUs that take such scales."""

    config: dict[str, dict[str, int]] | None
    async_finish: bool
    rows: str


class SglangShared:
    """The configuration and the one buffer of a process."""

    def __init__(self, group: Any, settings: SglangSettings) -> None:
        module, self.settings = imported(), settings
        self.Buffer: Any = module.Buffer
        self.dispatch_config = self.combine_config = None
        num_sms = self.Buffer.num_sms
        if settings.config is not None:
            self.dispatch_config = module.Config(**settings.config["normal_dispatch"])
            self.combine_config = module.Config(**settings.config["normal_combine"])
            num_sms = settings.config["normal_dispatch"]["num_sms"]
        self.bytes_of_row = H * (2 if settings.rows == "bf16" else 1)
        self._buffer: Any = None
        self._group, self._num_qps = group, num_sms

    def buffer(self) -> Any:
        if self._buffer is None:
            size, nvl, rdma = self._group.size(), 0, 0
            for config in (
                self.dispatch_config or self.Buffer.get_dispatch_config(size),
                self.combine_config or self.Buffer.get_combine_config(size),
            ):
                nvl = max(config.get_nvl_buffer_size_hint(self.bytes_of_row, size), nvl)
                rdma = max(config.get_rdma_buffer_size_hint(self.bytes_of_row, size), rdma)
            self._buffer = self.Buffer(
                self._group,
                nvl,
                rdma,
                low_latency_mode=False,
                num_qps_per_rank=self._num_qps,
                allow_mnnvl=True,
            )
            assert not self._buffer.low_latency_mode  # else SGLang cleans it between modes
        return self._buffer


class SglangDispatcher:
    """The normal mode's dispatcher; two micro-batches have one each, and the buffer together."""

    def __init__(self, case: Case, rank: int, shared: SglangShared) -> None:
        self.case, self.rank, self.shared = case, rank, shared
        self.settings = shared.settings
        self.handle: Any = None
        self.state: Any = None  # between the halves of a call

    def captured(self) -> Any:
        return self.shared.Buffer.capture() if self.settings.async_finish else None

    def dispatch_a(self, x: Tensor, topk_ids: Tensor, weights: Tensor) -> None:
        rows: Rows = x
        if self.settings.rows != "bf16":
            codes, scales = quantised(x)
            rows = codes, packed(scales) if self.settings.rows == "ue8m0" else scales
        self.state = rows, topk_ids.to(torch.int64), weights, self.captured()

    def dispatch_b(self) -> tuple[Rows, Tensor, Tensor, list[int]]:
        x, topk_ids, weights, previous = self.state
        buffer = self.shared.buffer()
        per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
            topk_ids,
            E,
            previous_event=previous,
            async_finish=self.settings.async_finish,
            allocate_on_comm_stream=previous is not None,
        )
        rows, ids, weights, counts, self.handle, event = buffer.dispatch(
            x,
            topk_idx=topk_ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=previous,
            async_finish=self.settings.async_finish,
            allocate_on_comm_stream=previous is not None and self.settings.async_finish,
            expert_alignment=128,
            config=self.shared.dispatch_config,
        )
        if self.settings.async_finish:
            event.current_stream_wait()
        return rows, ids, weights, counts

    def experts(self, rows: Rows, ids: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        """Rows go to segments of 128 k for each expert; results are gathered with weights; rows are freed."""
        codes, scales = rows if isinstance(rows, tuple) else (rows, None)
        if sum(counts) == 0:
            return codes.bfloat16()
        if self.settings.rows == "ue8m0":
            assert scales is not None and scales.dtype == torch.int32 and scales.is_contiguous()
            scales = unpacked(scales)
        assert len(counts) == self.case.local and not any(count % 128 for count in counts)
        segments = torch.zeros(sum(counts), H)
        token, choice = (ids >= 0).nonzero(as_tuple=True)
        expert, row = ids[token, choice], values(codes, scales)[token]
        begins = torch.tensor([0, *counts]).cumsum(0)
        place = torch.zeros_like(expert)
        for e in range(self.case.local):
            mine = expert == e
            place[mine] = begins[e] + torch.arange(int(mine.sum()))
            assert int(mine.sum()) <= counts[e]
        segments[place] = row
        of_row = torch.arange(self.case.local).repeat_interleave(torch.tensor(counts))
        done = (segments * self.case.factors(self.rank)[of_row]).to(torch.bfloat16)
        codes.set_(torch.empty(0, dtype=codes.dtype))  # type: ignore[call-overload]
        gathered = torch.zeros(len(ids), H)
        gathered.index_add_(0, token, done[place].float() * weights[token, choice].unsqueeze(1))
        return gathered.to(torch.bfloat16)

    def combine_a(self, output: Tensor) -> None:
        self.state = output, self.captured()

    def combine_b(self) -> Tensor:
        x, previous = self.state
        combined, _, event = self.shared.buffer().combine(
            x,
            self.handle,
            async_finish=self.settings.async_finish,
            previous_event=previous,
            allocate_on_comm_stream=previous is not None,
            config=self.shared.combine_config,
        )
        if self.settings.async_finish:
            event.current_stream_wait()
        self.handle = None
        return combined
