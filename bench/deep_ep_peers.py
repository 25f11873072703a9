"""DeepEP's normal (V1), elastic (V2) and hybrid buffers, if a `deep_ep` that has them can be imported.

The adapters are written from the public interfaces. FP8 rows are quantised before the time starts, because
these libraries leave that to the caller. Combine then gets them as BF16 rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import Case, Traffic
from bench.systems import MODE_SUFFIX, Sample, System, label_of
from uccl_ep_train.oracle.fp8 import quantize

DEFAULT_NUM_SMS = 24


class DeepEpSystem(System):
    """Common base of the three systems. It keeps a run's input and the result of its dispatch."""

    def __init__(self, case: Case, mode: str) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("needs a GPU")
        self.case = case
        self.mode = mode
        self.name = type(self).name + MODE_SUFFIX[mode]
        self.dtype = case.dtype
        self.num_sms = case.num_sms or DEFAULT_NUM_SMS
        self._sample: Sample | None = None
        self._sent: Any = None
        self._known: Any = None
        self._handle: Any = None
        self._rows: Any = None
        self._expert_rows: Tensor | None = None
        self._out: Tensor | None = None

    def bind(self, sample: Sample) -> None:
        """Runs a dispatch, which gives the handle for the cached mode and the rows to combine."""
        self._sample, self._known, self._out, self._sent = sample, None, None, sample.x
        if self.dtype == "fp8":
            codes, scales = quantize(sample.x)
            self._sent = (codes.view(torch.float8_e4m3fn), scales)
        self.run("dispatch")
        if self.mode == "cached_plan":
            self._known = self._handle
        codes = self._rows[0] if isinstance(self._rows, tuple) else self._rows
        self._expert_rows = codes.to(torch.bfloat16)

    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        """As for `uccl_ep`: these systems also send a row once per rank and once per domain."""
        return traffic.row_wire(op)


class DeepEpV1(DeepEpSystem):
    """`Buffer.get_dispatch_layout`, `dispatch`, `combine`. Rows arrive in order of source rank, once each."""

    name = "deep_ep_v1"
    layout = "rank_major"
    end_to_end = False

    def __init__(self, case: Case, mode: str) -> None:
        super().__init__(case, mode)
        buffer = importlib.import_module("deep_ep").Buffer
        buffer.set_num_sms(self.num_sms)
        tunings = [buffer.get_dispatch_config(case.ranks), buffer.get_combine_config(case.ranks)]
        near = max(tuning.get_nvl_buffer_size_hint(case.row_bytes, case.ranks) for tuning in tunings)
        far = 0
        if case.domains > 1:
            far = max(tuning.get_rdma_buffer_size_hint(case.row_bytes, case.ranks) for tuning in tunings)
        self._buffer = buffer(dist.group.WORLD, near, far, explicitly_destroy=True)

    def run(self, op: str) -> None:
        assert self._sample is not None
        if op == "combine":
            self._out, _, _ = self._buffer.combine(self._expert_rows, self._handle)
        elif self._known is not None:
            self._buffer.dispatch(self._sent, handle=self._known)
        else:
            idx = self._sample.topk_idx
            layout = self._buffer.get_dispatch_layout(idx, self.case.experts)
            per_rank, per_node, per_expert, wanted, _ = layout
            self._rows, _, _, _, self._handle, _ = self._buffer.dispatch(
                self._sent,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=wanted,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                topk_weights=self._sample.topk_weights,
            )

    def close(self) -> None:
        self._buffer.destroy()


class DeepEpV2(DeepEpSystem):
    """`ElasticBuffer.dispatch` to expanded (expert-major) rows, `combine` from them."""

    name = "deep_ep_v2"

    def __init__(self, case: Case, mode: str) -> None:
        super().__init__(case, mode)
        self.end_to_end = case.dtype == "bf16"
        self._buffer = importlib.import_module("deep_ep").ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=case.tokens,
            hidden=case.hidden,
            num_topk=case.topk,
            explicitly_destroy=True,
        )

    def run(self, op: str) -> None:
        assert self._sample is not None
        if op == "combine":
            self._out, _, _ = self._buffer.combine(self._expert_rows, self._handle, num_sms=self.num_sms)
            return
        if self._known is not None:
            routing: dict[str, Any] = {"handle": self._known}
        else:
            routing = {"topk_idx": self._sample.topk_idx, "do_cpu_sync": self.mode != "sync_free"}
        self._rows, _, _, self._handle, _ = self._buffer.dispatch(
            self._sent,
            topk_weights=self._sample.topk_weights,
            num_experts=self.case.experts,
            expert_alignment=1,
            num_sms=self.num_sms,
            do_expand=True,
            **routing,
        )

    def results(self) -> dict[str, Tensor]:
        return {"output": self._out} if self._out is not None and self.dtype == "bf16" else {}

    def close(self) -> None:
        self._buffer.destroy()


class HybridEp(DeepEpSystem):
    """`HybridEPBuffer.dispatch_with_permute` and `combine_with_unpermute`, permutation fused."""

    name = "hybrid_ep"

    def __init__(self, case: Case, mode: str) -> None:
        super().__init__(case, mode)
        self.end_to_end = case.dtype == "bf16"
        self._buffer = importlib.import_module("deep_ep").HybridEPBuffer(
            dist.group.WORLD,
            hidden_dim=case.hidden,
            max_num_of_tokens_per_rank=case.tokens,
            num_local_experts=case.experts // case.ranks,
            use_fp8=case.dtype == "fp8",
            num_sms_dispatch_api=self.num_sms,
            num_sms_combine_api=self.num_sms,
        )
        self._num_rows: int | None = None

    def bind(self, sample: Sample) -> None:
        own = int(sample.traffic.pairs_NN[:, dist.get_rank()].sum())
        self._num_rows = {"sync_free": sample.traffic.capacity_rows(), "cached_plan": own}.get(self.mode)
        super().bind(sample)

    def run(self, op: str) -> None:
        assert self._sample is not None
        if op == "combine":
            self._out, _ = self._buffer.combine_with_unpermute(
                hidden=self._expert_rows, handle=self._handle, fuse_unpermute_combine=True
            )
            return
        hidden, scales = self._sent if isinstance(self._sent, tuple) else (self._sent, None)
        self._rows, _, _, _, self._handle = self._buffer.dispatch_with_permute(
            hidden=hidden if scales is None else hidden.view(torch.uint8),
            scaling_factor=scales,
            topk_idx=self._sample.topk_idx,
            topk_weights=self._sample.topk_weights,
            num_of_experts=self.case.experts,
            num_permuted_tokens=self._num_rows,
            handle=self._known,
            non_blocking=self.mode == "sync_free",
            fuse_permute_dispatch=True,
        )

    def results(self) -> dict[str, Tensor]:
        return {"output": self._out} if self._out is not None and self.dtype == "bf16" else {}


BUFFERS: dict[str, tuple[type[DeepEpSystem], tuple[str, ...]]] = {
    "Buffer": (DeepEpV1, ("uncached", "cached_plan")),
    "ElasticBuffer": (DeepEpV2, ("uncached", "sync_free", "cached_plan")),
    "HybridEPBuffer": (HybridEp, ("uncached", "sync_free", "cached_plan")),
}


@lru_cache(maxsize=1)
def _library() -> tuple[Any, str]:
    """The module, or None and the reason. Its import checks the machine, and may raise any error."""
    try:
        return importlib.import_module("deep_ep"), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def lacking() -> str:
    """Why no buffer of deep_ep is measured, or ""."""
    library, reason = _library()
    if library is not None and not any(hasattr(library, name) for name in BUFFERS):
        return f"it has none of {', '.join(BUFFERS)}"
    return reason


def about_deep_ep() -> str:
    """One line: which buffers of deep_ep are measured, or why none is."""
    if reason := lacking():
        return f"deep_ep is not measured: {reason}"
    return f"deep_ep is measured with {', '.join(name for name in BUFFERS if hasattr(_library()[0], name))}"


def importable(case: Case) -> Iterator[tuple[str, Callable[[], System]]]:
    """(label, constructor) of each buffer and mode that the library has."""
    for name, (system, modes) in BUFFERS.items():
        for mode in modes if hasattr(_library()[0], name) else ():
            label = label_of(system.name + MODE_SUFFIX[mode], system.layout, case.dtype)
            yield label, partial(system, case, mode)
