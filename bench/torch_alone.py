"""Torch's share of forward + backward: two empty autograd functions.

The host waits until the GPU has begun, as in a dispatch with a new plan. No dispatcher that consists of two
autograd functions takes less time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.cases import BACKWARD, Case, Traffic
from bench.systems import Sample, System


class _Nothing(torch.autograd.Function):
    """Returns results and gradients that were made in advance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, ready: tuple[Any, Any]) -> Any:
        ctx.set_materialize_grads(True)
        results, ctx.gradients = ready
        return results

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        return (*ctx.gradients, None)


class TorchAlone(System):
    name = "torch_autograd"
    ops = (BACKWARD,)
    end_to_end = False

    def __init__(self, case: Case) -> None:
        self.dtype = "bf16"
        self._num_rows = case.tokens * case.topk
        self._started = torch.cuda.Event()

    def bind(self, sample: Sample) -> None:
        x_TH, weights_TK = sample.x, sample.topk_weights
        self._x, self._weights = x_TH, weights_TK
        rows_RH = x_TH.new_zeros(self._num_rows, x_TH.shape[1])
        row_weights_R = weights_TK.new_zeros(self._num_rows)
        self._ones = torch.ones_like(row_weights_R)
        self._dispatch = (rows_RH, row_weights_R), (torch.zeros_like(x_TH), torch.zeros_like(weights_TK))
        self._combine = torch.zeros_like(x_TH), (torch.zeros_like(rows_RH), None)

    def run(self, op: str) -> None:
        self._started.record()
        while not self._started.query():
            pass
        leaf, weights = self._x.detach().requires_grad_(), self._weights.detach().requires_grad_()
        with torch.enable_grad():
            rows, row_weights = _Nothing.apply(leaf, weights, self._dispatch)
            out = _Nothing.apply(rows, None, self._combine)
            torch.autograd.backward([out, row_weights], [self._x, self._ones])

    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        return 0, 0
