"""What every measured system offers, and ours: `Buffer`, uncached and with a cached plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case, Traffic
from uccl_ep_train import Buffer, EpConfig

OPS = ("dispatch", "combine")


@dataclass(frozen=True)
class Sample:
    """One run's input on this rank: x [T, H] BF16, topk_idx [T, K] int64, topk_weights [T, K] fp32."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    traffic: Traffic


class System(ABC):
    """A way to dispatch and combine. `bind` is not timed and collective; each of `run`'s calls is timed.

    mode        "uncached" (the routing is new to the system) | "cached_plan"
    layout      how dispatch leaves the rows
    num_sms     that the system was limited to; 0: it has no such limit, or there is no GPU
    end_to_end  the call starts from hidden states and routing and ends with rows in `layout`, and back
    """

    name: str
    mode: str = "uncached"
    layout: str = "expert_major"
    dtype: str = "bf16"
    end_to_end: bool = True
    num_sms: int = 0

    @property
    def label(self) -> str:
        notes = [self.mode] * (self.mode != "uncached") + [self.layout] * (self.layout == "expert_major_fp8")
        return self.name + (f" ({', '.join(notes)})" if notes else "")

    @abstractmethod
    def bind(self, sample: Sample) -> None:
        """Takes a run's input, and forgets the results of the last."""

    @abstractmethod
    def run(self, op: str) -> None:
        """One whole dispatch or combine; the experts between them are the identity."""

    @abstractmethod
    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        """Bytes that the busiest rank exchanges with others, and those of them between domains."""

    def results(self) -> tuple[Tensor, Tensor] | None:
        """(rows [R, H], output [T, H]) of the last run where they can be compared between systems."""
        return None

    def step_seconds(self) -> dict[str, float]:
        """Time in each step since creation, where the system counts it."""
        return {}

    def close(self) -> None:  # noqa: B027 - nothing to give back is a valid answer
        """Gives everything back. Collective."""


class UcclEp(System):
    """`Buffer.dispatch` and `Buffer.combine`. Several modes share one buffer."""

    name = "uccl_ep"

    def __init__(self, buffer: Buffer, dtype: str, *, cached: bool, fp8_rows: bool = False) -> None:
        self.buffer = buffer
        self.dtype = dtype
        self.mode = "cached_plan" if cached else "uncached"
        self.num_sms = buffer.config.num_sms if buffer.device.type == "cuda" else 0
        self._output = "fp8" if fp8_rows else None
        if fp8_rows:
            self.layout = "expert_major_fp8"
        self._sample: Sample | None = None
        self._known: Any = None
        self._dispatched: Any = None
        self._expert_rows: Tensor | None = None
        self._out: Tensor | None = None

    @staticmethod
    def create_buffer(case: Case) -> Buffer:
        """Settings come from the environment where the case does not decide them."""
        config = EpConfig.from_env(
            num_experts=case.experts,
            hidden=case.hidden,
            dispatch_dtype=case.dtype,
            max_dtype="bf16",
            domain_size=case.domain_size,
            loop_gbytes_per_s=case.link_gbytes_per_s,
        )
        return Buffer(None, config)

    def bind(self, sample: Sample) -> None:
        self._sample = sample
        self._known = self._dispatched = self._out = self._expert_rows = None
        if self.mode == "cached_plan" or self._output:
            first = self.buffer.dispatch(sample.x, sample.topk_idx, sample.topk_weights)
            self._known = first.handle if self.mode == "cached_plan" else None
            self._expert_rows = first.rows if self._output else None

    def run(self, op: str) -> None:
        sample = self._sample
        assert sample is not None
        if op == "combine":
            rows = self._dispatched.rows if self._expert_rows is None else self._expert_rows
            self._out = self.buffer.combine(rows, self._dispatched.handle)
        else:
            self._dispatched = self.buffer.dispatch(
                sample.x,
                sample.topk_idx if self._known is None else None,
                sample.topk_weights,
                handle=self._known,
                output_dtype=self._output,
            )

    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        return traffic.row_wire(op)

    def results(self) -> tuple[Tensor, Tensor] | None:
        assert self._out is not None
        return None if self._output else (self._dispatched.rows, self._out)

    def step_seconds(self) -> dict[str, float]:
        prefix = "busy_seconds."
        stats = self.buffer.stats()
        return {name.removeprefix(prefix): stats[name] for name in stats if name.startswith(prefix)}

    def close(self) -> None:
        self.buffer.close()


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Relative to the largest magnitude of b."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    wide_a, wide_b = a.to(torch.float32), b.to(torch.float32)
    return float((wide_a - wide_b).abs().max() / wide_b.abs().max().clamp_min(1e-30))
