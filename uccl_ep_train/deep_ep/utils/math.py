"""Quantising, comparing and grouping, as DeepEP's tests call them."""

from __future__ import annotations

import torch
from torch import Tensor

from uccl_ep_train.common.exponents import dense

_BLOCK = 128
_E4M3_MAX = 448.0


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The least multiple of y that is not below x."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """a / b, and 0 for 0 / 0."""
    return 0.0 if a == 0 and b == 0 else a / b


def calc_diff(x: Tensor, y: Tensor) -> float:
    """0 for equal tensors: 1 - 2 <a, b> / (<a, a> + <b, b>) of a = x + 1 and b = y + 1."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * torch.sum(a * b) / torch.sum(a.square() + b.square()))


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of [T, H]: codes [T, H] float8_e4m3fn, and scales [T, ceil(H / 128)] float32, which are amax / 448."""
    tokens, hidden = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -hidden % _BLOCK)).view(tokens, -1, _BLOCK)
    scales = blocks.abs().amax(2).clamp(min=1e-4) / _E4M3_MAX
    codes = (blocks / scales[:, :, None]).to(torch.float8_e4m3fn).view(tokens, -1)
    return codes[:, :hidden].contiguous(), scales


def per_token_cast_back(codes: Tensor, scales: Tensor) -> Tensor:
    """The bfloat16 rows [T, H]. scales: float32, or int32 of four exponents of powers of two each."""
    if codes.numel() == 0:
        return codes.to(torch.bfloat16)
    tokens, hidden = codes.shape
    if scales.dtype == torch.int32:
        exponents = dense(scales).view(torch.uint8).to(torch.int32)
        scales = (exponents << 23).view(torch.float32)
    blocks = torch.nn.functional.pad(codes.float(), (0, -hidden % _BLOCK)).view(tokens, -1, _BLOCK)
    rows = blocks * scales.reshape(tokens, -1, 1)
    return rows.view(tokens, -1)[:, :hidden].to(torch.bfloat16).contiguous()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Each row of x [T, K] keeps its different numbers from 0 to num_slots - 1, and -1 after them.

    More frequent ones come first, then larger ones.
    """
    counts = torch.zeros(len(x), num_slots + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(1, x.masked_fill(x < 0, num_slots).long(), torch.ones_like(x, dtype=torch.int64))
    numbers = torch.arange(num_slots, device=x.device).expand(len(x), num_slots)
    found = numbers.masked_fill(counts[:, :num_slots] == 0, -1).sort(dim=1, descending=True).values
    x.fill_(-1)
    width = min(num_slots, x.shape[1])
    x[:, :width] = found[:, :width].to(x.dtype)


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """scores [T, E], zero outside the groups that group_idx [T, G] names."""
    chosen = torch.zeros(len(scores), num_groups, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(t: Tensor) -> int:
    """The sum of its 32-bit words: equal for equal bits."""
    return int(dense(t).view(torch.int32).sum(dtype=torch.int64))


def hash_tensors(*tensors: object) -> int:
    value = 0
    for t in tensors:
        if isinstance(t, (tuple, list)):
            value ^= hash_tensors(*t)
        elif isinstance(t, Tensor):
            value ^= hash_tensor(t)
    return value


def count_bytes(*tensors: object) -> int:
    total = 0
    for t in tensors:
        if isinstance(t, (tuple, list)):
            total += count_bytes(*t)
        elif isinstance(t, Tensor):
            total += t.numel() * t.element_size()
    return total
