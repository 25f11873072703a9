"""Rows and routings of generated cases (`tests/cases.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


def make_rows(
    generator: torch.Generator, num_rows: int, hidden: int, dtype: torch.dtype, *, special: bool = False
) -> Tensor:
    """Rows whose blocks differ in magnitude; `special` adds values that round, saturate or propagate."""
    rows = torch.randn(num_rows, hidden, generator=generator)
    if num_rows == 0:
        return rows.to(dtype)
    exponents = torch.randint(-6, 7, (num_rows, -(-hidden // 128)), generator=generator)
    rows = rows * torch.exp2(exponents.float()).repeat_interleave(128, dim=1)[:, :hidden]
    if special:
        odd = torch.tensor(
            [0.0, -0.0, 448.0, 1e30, -1e-30, 3e38, 1e-40, float("inf"), -float("inf"), float("nan")]
        )
        # Few enough that most blocks stay finite, most rows see one.
        where = torch.rand(num_rows, hidden, generator=generator) < 1 / 256
        rows[where] = odd[torch.randint(len(odd), (int(where.sum()),), generator=generator)]
        rows[torch.rand(num_rows, generator=generator) < 0.1] = -0.0
    return rows.to(dtype)


def make_biases(seed: int, counts: Sequence[int], x: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """For each rank so many tensors like its x [T, H]; with an odd seed they have special values."""
    generator = torch.Generator().manual_seed(seed + 2)
    return [
        tuple(
            make_rows(generator, len(like), like.shape[1], like.dtype, special=seed % 2 == 1)
            for _ in range(count)
        )
        for count, like in zip(counts or [0] * len(x), x, strict=True)
    ]


def experts_in_focus(rng: random.Random, num_experts: int, per_rank: int, focus: str) -> list[int]:
    """What the tokens of a case may name; `focus` as in `make_case`."""
    expert = rng.randrange(num_experts)
    if focus == "expert":
        return [expert]
    if focus == "rank":
        first = expert // per_rank * per_rank
        return list(range(first, first + per_rank))
    assert focus == "spread", focus
    return list(range(num_experts))


def make_topk(
    generator: torch.Generator, count: int, top_k: int, allowed: list[int], drop_rate: float
) -> Tensor:
    """int64 [T, K]: different experts in random order; -1 where dropped or where `allowed` has too few."""
    topk_idx_TK = torch.full((count, top_k), -1)
    num_named = min(top_k, len(allowed))
    order_TA = torch.rand(count, len(allowed), generator=generator).argsort(dim=1)
    topk_idx_TK[:, :num_named] = torch.tensor(allowed)[order_TA[:, :num_named]]
    column_TK = torch.rand(count, top_k, generator=generator).argsort(dim=1)
    topk_idx_TK = topk_idx_TK.gather(1, column_TK)
    # Whole tokens without experts, too.
    dropped = torch.rand(count, top_k, generator=generator) < drop_rate
    dropped |= torch.rand(count, 1, generator=generator) < drop_rate / 2
    return topk_idx_TK.masked_fill(dropped, -1)


def make_map(
    generator: torch.Generator, count: int, num_experts: int, allowed: list[int], density: float
) -> Tensor:
    """bool [T, E]. Now and then a token reaches every allowed expert: what padding of a routing map makes."""
    map_TE = torch.zeros(count, num_experts, dtype=torch.bool)
    map_TE[:, allowed] = torch.rand(count, len(allowed), generator=generator) < density
    everywhere_T = torch.rand(count, generator=generator) < 0.1
    map_TE[:, allowed] |= everywhere_T[:, None]
    return map_TE
