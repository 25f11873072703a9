"""A dispatcher that moves rows instantly, for `megatron_step.py`: the time of a step without communication.

It replaces the stages of a layer's dispatcher. All experts get the same number of rows, so no rank waits for
the fullest one. Rows and gradients are constants, so losses mean nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Instead(torch.autograd.Function):
    """Replaces x and its gradient by two constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, constants: tuple[Tensor, Tensor]) -> Tensor:
        # Autograd does not take tensors inside a tuple for inputs.
        given, ctx.grad = constants
        return given.detach()

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.grad.detach(), None


class Ideal:
    """Replaces the stages of a dispatcher.

    num_experts  experts of this rank
    topk         experts of a token
    """

    def __init__(self, dispatcher: Any, num_experts: int, topk: int) -> None:
        self._num_experts = num_experts
        self._topk = topk
        self._constants: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._like = torch.empty(0)
        self._shape = torch.Size()
        for name in ("token_dispatch", "combine_preprocess", "token_combine"):
            setattr(dispatcher, name, self._pass)
        for name in ("dispatch_preprocess", "dispatch_postprocess", "combine_postprocess"):
            setattr(dispatcher, name, getattr(self, name))

    def dispatch_preprocess(
        self, hidden: Tensor, _routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden [S, B, H] -> [n, H]; probs [n, E]."""
        self._shape, self._like = hidden.shape, hidden.detach()
        return hidden.view(-1, hidden.shape[-1]), probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, H], [n, E] -> rows [n topk, H], tokens of each expert [L], probs of the rows [n topk]."""
        num_tokens, width = hidden.shape
        num_rows = num_tokens * self._topk
        rows = _Instead.apply(
            hidden, (self._noise(num_rows, width), self._constant("zeros", num_tokens, width))
        )
        zeros = self._constant("zeros", *probs.shape).to(probs.dtype)
        row_probs = torch.full((num_rows,), 1 / self._topk, dtype=probs.dtype, device=probs.device)
        counts = torch.full((self._num_experts,), num_rows // self._num_experts, dtype=torch.int64)
        counts[: num_rows % self._num_experts] += 1
        return rows, counts, _Instead.apply(probs, (row_probs, zeros))

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """[n topk, H] -> [S, B, H]."""
        return _Instead.apply(rows, (self._noise(*self._shape), self._noise(*rows.shape)))

    @staticmethod
    def _pass(hidden: Tensor, *others: Any) -> Any:
        return (hidden, *others) if others else hidden

    def _noise(self, *shape: int) -> Tensor:
        return self._constant("noise", *shape)

    def _constant(self, what: str, *shape: int) -> Tensor:
        key = (what, shape)
        if key not in self._constants:
            like = self._like
            made = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self._constants[key] = made.normal_(std=0.02) if what == "noise" else made
        return self._constants[key]
