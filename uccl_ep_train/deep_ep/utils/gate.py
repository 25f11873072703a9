"""Scores of experts, made up, as DeepEP's tests draw them: rank 0 gets more tokens than the others."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 20  # of the search for a factor


def tokens_of_ranks(scores: Tensor, num_ranks: int, num_topk: int) -> Tensor:
    """[R] float64: how many tokens each rank gets by the highest scores [T, E]."""
    ranks = scores.topk(num_topk, dim=1).indices // (scores.shape[1] // num_ranks)
    goes = torch.zeros(len(scores), num_ranks, dtype=torch.float64, device=scores.device)
    return goes.scatter_(1, ranks, 1.0).sum(0)


def _is_enough(scores: Tensor, num_ranks: int, num_topk: int, ratio: float) -> bool:
    tokens = tokens_of_ranks(scores, num_ranks, num_topk)
    return bool(tokens[0] >= ratio * tokens[1:].mean())


def _favoured(scores: Tensor, local: int, factor: float) -> Tensor:
    """The same scores, but for those of rank 0's experts, which are multiplied."""
    scores = scores.clone()
    scores[:, :local] *= factor
    return scores


def _exact(scores: Tensor, local: int, num_tokens_to_0: int) -> Tensor:
    """The first tokens go to rank 0, and no others do."""
    scores = scores.clone()
    scores[:num_tokens_to_0, 0] += 1
    scores[num_tokens_to_0:, :local] -= 1
    return scores


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool = False
) -> Tensor:
    """[T, E] float32. By the `num_topk` highest of each token, rank 0 gets `ratio` times as many tokens as
    the other ranks on average, if so many there are.

    precise  whole tokens are moved to rank 0, or away from it; else all scores of its experts are scaled
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32, device=device)
    local = num_experts // num_ranks
    if ratio == 1.0 or num_ranks == 1:
        return scores
    if precise:
        least, most = 0, num_tokens
        while least < most:
            middle = (least + most) // 2
            enough = _is_enough(_exact(scores, local, middle), num_ranks, num_topk, ratio)
            least, most = (least, middle) if enough else (middle + 1, most)
        return _exact(scores, local, least)[torch.randperm(num_tokens, device=device)]
    low, high = 1.0, 100.0
    for _ in range(_STEPS):
        factor = (low + high) / 2
        enough = _is_enough(_favoured(scores, local, factor), num_ranks, num_topk, ratio)
        low, high = (low, factor) if enough else (factor, high)
    return _favoured(scores, local, high)
