"""The interface of every measured system, and `uccl_ep`: `Buffer` in its three modes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.cases import BACKWARD, OPS, Case, Traffic
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.settings import env


@dataclass(frozen=True)
class Sample:
    """One run's input on this rank: x [T, H] BF16, topk_idx [T, K] int64, topk_weights [T, K] fp32."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    traffic: Traffic


class System(ABC):
    """A way to dispatch and combine. `bind` is collective and not timed; each call of `run` is timed.

    mode        "uncached" (the routing is new to the system, counts go to the host) | "sync_free" (also new,
                but the host waits for nothing) | "cached_plan"
    ops         what `run` takes; `BACKWARD` is dispatch, combine and the backward of both, with x as the
                output's gradient and ones as the gradient of the rows' weights
    layout      how dispatch leaves the rows
    num_sms     SMs that the system was limited to; 0: it has no such limit, or there is no GPU
    stage_sms   SMs that its staging was limited to; 0: staging has no limit of its own
    end_to_end  calls go from hidden states and routing to rows in `layout`, and back
    """

    name: str
    mode: str = "uncached"
    ops: tuple[str, ...] = OPS
    layout: str = "expert_major"
    dtype: str = "bf16"
    end_to_end: bool = True
    num_sms: int = 0
    stage_sms: int = 0

    @property
    def label(self) -> str:
        return label_of(self.name, self.layout, self.dtype)

    @abstractmethod
    def bind(self, sample: Sample) -> None:
        """Takes a run's input, and forgets the results of the last run."""

    @abstractmethod
    def run(self, op: str) -> None:
        """One whole operation; the experts between dispatch and combine are the identity."""

    @abstractmethod
    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        """Bytes that the busiest rank exchanges with others, and the part between domains."""

    def results(self) -> dict[str, Tensor]:
        """Results of the last run, to compare systems: rows [R, H], output [T, H], gradient [T, H]."""
        return {}

    def check(self) -> None:  # noqa: B027 - nothing to check is a valid answer
        """Raises if the last run failed without an error of its calls. Not timed."""

    def step_seconds(self) -> dict[str, float]:
        """Time in each step since creation; empty if the system does not count it."""
        return {}

    def num_windows(self) -> float:
        """Windows of all operations since creation; 0 if the system has none."""
        return 0.0

    def close(self) -> None:  # noqa: B027 - nothing to give back is a valid answer
        """Frees everything. Collective."""


def label_of(name: str, layout: str, dtype: str) -> str:
    """The name that a reader sees. No two systems of a case have the same label."""
    return f"{name} {dtype}" + {"expert_major_fp8": " codes", "compact": " compact"}.get(layout, "")


MODE_SUFFIX = {"uncached": "", "sync_free": "_sync_free", "cached_plan": "_cached"}


class UcclEp(System):
    """`Buffer.dispatch` and `Buffer.combine`. Several modes share one buffer."""

    name = "uccl_ep"

    def __init__(
        self, buffer: Buffer, dtype: str, *, mode: str, layout: str = "expert_major", backward: bool = False
    ) -> None:
        """layout: as in the table; "expert_major_fp8": rows stay codes and scales"""
        self.buffer = buffer
        self.dtype = dtype
        self.mode = mode
        self.name = type(self).name + MODE_SUFFIX[mode]
        if buffer.device.type == "cuda":
            gpu = buffer.config.gpu
            self.num_sms, self.stage_sms = gpu.num_sms, gpu.stage_sms or 0
        self.layout = layout
        fp8_rows = layout == "expert_major_fp8"
        self._extra: dict[str, Any] = {"output_dtype": "fp8"} if fp8_rows else {}
        if backward and not fp8_rows:
            self.ops = (*OPS, BACKWARD)
        self._sample: Sample | None = None
        self._given: dict[str, Any] = {}  # the routing, as an argument
        self._weights = torch.empty(0)  # of the routing's pairs
        self._known: Any = None
        self._capacity: dict[str, Any] = {}
        self._dispatched: Any = None
        self._expert_rows: Tensor | None = None
        self._out: Tensor | None = None
        self._leaf: Tensor | None = None

    @staticmethod
    def create_buffer(case: Case) -> Buffer:
        """Settings that the case does not decide come from the environment."""
        sms = {"num_sms": case.num_sms, "stage_sms": case.stage_sms}
        chosen: dict[str, Any] = {name: value for name, value in sms.items() if value}
        config = EpConfig.from_env(
            num_experts=case.experts,
            hidden=case.hidden,
            dispatch_dtype=case.dtype,
            max_dtype="bf16",
            domain_size=case.domain_size,
            loop_gbytes_per_s=case.link_gbytes_per_s,
            **chosen,
        )
        return Buffer(None, config)

    def bind(self, sample: Sample) -> None:
        self._sample = sample
        self._known = self._dispatched = self._out = self._expert_rows = self._leaf = None
        if self.mode == "sync_free":
            self._capacity = {"capacity": sample.traffic.capacity_rows()}
        self._given, self._weights = {"topk_idx": sample.topk_idx}, sample.topk_weights
        if sample.traffic.case.form == "map":
            zeros_TE = sample.topk_weights.new_zeros(len(sample.x), sample.traffic.case.experts)
            self._weights = zeros_TE.scatter(1, sample.topk_idx, sample.topk_weights)
            self._given = {"routing_map": zeros_TE.bool().scatter(1, sample.topk_idx, True)}
        if self.mode == "cached_plan" or self._extra:
            first = self._dispatch(sample.x, self._weights)
            self._known = first.handle if self.mode == "cached_plan" else None
            self._expert_rows = first.rows if self._extra else None

    def run(self, op: str) -> None:
        sample = self._sample
        assert sample is not None
        if op == "dispatch":
            self._dispatched = self._dispatch(sample.x, self._weights, **self._extra)
        elif op == "combine":
            rows = self._dispatched.rows if self._expert_rows is None else self._expert_rows
            self._out = self.buffer.combine(rows, self._dispatched.handle)
        else:
            self._leaf = sample.x.detach().requires_grad_()
            with torch.enable_grad():
                there = self._dispatch(self._leaf, self._weights.detach().requires_grad_())
                out = self.buffer.combine(there.rows, there.handle)
                ones = torch.ones_like(there.row_weights)
                torch.autograd.backward([out, there.row_weights], [sample.x, ones])

    def _dispatch(self, x: Tensor, weights: Tensor, **extra: Any) -> Any:
        given = {} if self._known is not None else self._given
        if self.layout == "compact":
            extra = {"layout": "compact", **extra}
        values: dict[str, Any] = {"probs" if "routing_map" in self._given else "topk_weights": weights}
        return self.buffer.dispatch(x, **given, **values, handle=self._known, **self._capacity, **extra)

    def check(self) -> None:
        if self._capacity and bool(self._dispatched.overflow):
            raise RuntimeError(f"{self.name}: {self._capacity} rows were not enough")

    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        return traffic.row_wire(op, self.buffer.config.wire.grad_dtype)

    def results(self) -> dict[str, Tensor]:
        assert self._out is not None
        if self.layout != "expert_major":
            return {}
        num_rows = int(self._dispatched.tokens_per_expert.sum())
        found = {"rows": self._dispatched.rows[:num_rows], "output": self._out}
        if self._leaf is not None and self._leaf.grad is not None:
            found["gradient"] = self._leaf.grad
        return found

    def step_seconds(self) -> dict[str, float]:
        stats = self.buffer.stats()
        return {
            name.removeprefix(prefix): stats[name]
            for prefix in ("busy_seconds.", "step_seconds.")
            for name in stats
            if name.startswith(prefix)
        }

    def num_windows(self) -> float:
        return self.buffer.stats().get("windows", 0.0)

    def close(self) -> None:
        self.buffer.close()


def on_one_host() -> bool:
    """Whether torchrun started all ranks here."""
    return env.read("LOCAL_WORLD_SIZE") == env.read("WORLD_SIZE")


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest magnitude of b; inf if the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    wide_a, wide_b = a.to(torch.float32), b.to(torch.float32)
    return float((wide_a - wide_b).abs().max() / wide_b.abs().max().clamp_min(1e-30))
