"""Comparison of tensors bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float8_e4m3fn: torch.uint8}


def bit_difference(seen: Tensor | None, wanted: Tensor | None) -> str:
    """Empty if both are None or equal in every bit, of NaN and zeros too; else what differs first."""
    if seen is None or wanted is None:
        return "" if seen is wanted else f"got {_kind(seen)}, wanted {_kind(wanted)}"
    if seen.dtype != wanted.dtype or seen.shape != wanted.shape:
        return f"got {_kind(seen)}, wanted {_kind(wanted)}"
    bits = _BITS.get(seen.dtype, seen.dtype)
    unequal = seen.contiguous().view(bits) != wanted.contiguous().view(bits)
    if not unequal.any():
        return ""
    place = tuple(unequal.nonzero()[0].tolist())
    return (
        f"{int(unequal.sum())} of {seen.numel()} differ, first at {place}: got {seen[place].item()!r}, "
        f"wanted {wanted[place].item()!r}"
    )


def _kind(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def flip_bit(tensor: Tensor) -> Tensor:
    """A copy whose last element differs in its lowest bit; equal if there is none. For negative controls."""
    copy = tensor.clone()
    if copy.numel() > 0:
        copy.view(_BITS.get(copy.dtype, copy.dtype)).view(-1)[-1] ^= 1
    return copy
