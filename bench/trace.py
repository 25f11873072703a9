"""Routing of a real training run, as `python -m recipes.launch --router-trace FILE` saves it.

A trace is a .npz file with num_experts and topk_idx [S, L, T, K] int16: S steps; L layers; T tokens of all
ranks, rank 0's first; K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BUNDLED = Path(__file__).resolve().parent / "traces" / "tiny_host.npz"


class TraceError(ValueError):
    """The file is not a router trace."""


@dataclass(frozen=True)
class Trace:
    topk_idx_SLTK: Tensor
    num_experts: int

    @property
    def topk(self) -> int:
        return self.topk_idx_SLTK.shape[-1]

    @property
    def tokens_per_layer(self) -> int:
        return self.topk_idx_SLTK.shape[0] * self.topk_idx_SLTK.shape[2]

    def problem(self, num_tokens: int, topk: int, num_experts: int) -> str:
        """Why the trace cannot give the routing of `num_tokens` tokens, or ""."""
        if (topk, num_experts) != (self.topk, self.num_experts):
            return f"the trace is of top-{self.topk} of {self.num_experts}, not top-{topk} of {num_experts}"
        if num_tokens > self.tokens_per_layer:
            return f"the trace has {self.tokens_per_layer} tokens of a layer, not {num_tokens} of all ranks"
        return ""

    def draw(self, num_tokens: int, generator: torch.Generator) -> Tensor:
        """[num_tokens, K] int64: consecutive tokens of one layer. Layer and first token are random."""
        layer = int(torch.randint(self.topk_idx_SLTK.shape[1], (), generator=generator))
        start = int(torch.randint(self.tokens_per_layer, (), generator=generator))
        tokens = self.topk_idx_SLTK[:, layer].flatten(0, 1)
        return tokens.roll(-start, 0)[:num_tokens].to(torch.int64)


@lru_cache(maxsize=4)
def load_trace(path: str) -> Trace:
    """Raises a TraceError that says what is wrong with the file."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            topk_idx, num_experts = saved["topk_idx"], int(saved["num_experts"])
    except Exception as error:  # what numpy and zipfile raise of damaged files has no common base
        raise TraceError(f"{path} is no router trace: {error}") from None
    if topk_idx.ndim != 4 or topk_idx.size == 0 or not np.issubdtype(topk_idx.dtype, np.integer):
        raise TraceError(f"{path}: topk_idx is {topk_idx.dtype} {topk_idx.shape}, not integers [S, L, T, K]")
    ordered = np.sort(topk_idx, axis=-1)
    if ordered.min() < 0 or ordered.max() >= num_experts:
        raise TraceError(f"{path}: experts from {ordered.min()} to {ordered.max()}, there are {num_experts}")
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise TraceError(f"{path}: a token has an expert twice")
    return Trace(torch.from_numpy(topk_idx), num_experts)
