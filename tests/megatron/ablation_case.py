"""What an ablation does to a layer's rows, run on ranks that have Megatron."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from recipes.models.tiny_host import tiny_host
from recipes.training import dispatchers


def rows_and_gradient(rank: int, ablate: str) -> tuple[list[float], list[float]]:
    """Of rows 1, 2, 3 after dispatch, and the gradient that goes back through them."""
    rows = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.bfloat16, requires_grad=True)
    counts, probs = torch.tensor([3]), torch.ones(3)
    dispatcher = SimpleNamespace(dispatch_postprocess=lambda hidden, _probs: (hidden, counts, probs))
    layer = SimpleNamespace(token_dispatcher=dispatcher)
    dispatchers.ablate(replace(tiny_host(), ablate=ablate), [layer])
    out, same_counts, same_probs = dispatcher.dispatch_postprocess(rows, probs)
    assert same_counts is counts and same_probs is probs
    out.sum().backward()
    assert rows.grad is not None
    return out.flatten().tolist(), rows.grad.flatten().tolist()
