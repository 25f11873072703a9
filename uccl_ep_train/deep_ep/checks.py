"""Tensors and numbers that callers give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uccl_ep_train.common.shown import shown
from uccl_ep_train.errors import DeviceError, DtypeError, InputError, ShapeError
from uccl_ep_train.settings.checks import MAX_EXPERTS, integer

MOST = (1 << 31) - 1
MOST_SMS = 1024


def check_number(name: str, value: Any, low: int, high: int = MOST) -> int:
    """An integer of these bounds, as an int. Raises `InputError`."""
    if type(value) is int and low <= value <= high:
        return value  # what is right costs a call nothing
    try:
        return integer(low, high).check(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} = {shown(value)}; allowed is {low} .. {high}") from None


def check_experts(num_experts: Any, num_ranks: int) -> None:
    """Raises `InputError`."""
    try:
        fits = integer(1, MAX_EXPERTS).check(num_experts) % num_ranks == 0
    except (TypeError, ValueError):
        fits = False
    if not fits:
        allowed = f"multiples of {num_ranks}, up to {MAX_EXPERTS}"
        raise InputError(f"num_experts = {shown(num_experts)}; allowed are {allowed}")


def check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """device: None: any. Raises `DtypeError`, `ShapeError`, `DeviceError`."""
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{name} is {type(tensor).__name__}; allowed is a torch.Tensor")
    if tensor.dtype != dtype:
        raise DtypeError(f"{name} is {tensor.dtype}; allowed is {dtype}")
    if tensor.shape != shape:
        raise ShapeError(f"{name} is {list(tensor.shape)}; allowed is {list(shape)}")
    if device is not None and tensor.device != device:
        raise DeviceError(f"{name} is on {tensor.device}; allowed is {device}")


def columns_of(name: str, rows: Any, *, quantised: bool = False) -> int:
    """Of rows [N, C], or of codes and scales, if they may be quantised. Raises `DtypeError`, `ShapeError`."""
    codes, *scales = rows if quantised and isinstance(rows, tuple) and len(rows) == 2 else (rows,)
    for part in (codes, *scales):
        if not isinstance(part, Tensor):
            allowed = "a torch.Tensor" + (", or codes and scales" if quantised else "")
            raise DtypeError(f"{name} is {type(part).__name__}; allowed is {allowed}")
    if codes.dim() != 2:
        raise ShapeError(f"{name} is {list(codes.shape)}; allowed are two dimensions")
    return codes.shape[1]


def check_topk(
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    tokens: int | None = None,
    device: torch.device | None = None,
) -> None:
    """[T, K] int64 and float32. None: any. Raises `DtypeError`, `ShapeError`, `DeviceError`."""
    if isinstance(topk_idx, Tensor) and topk_idx.dim() != 2:
        raise ShapeError(f"topk_idx is {list(topk_idx.shape)}; allowed is [T, K]")
    rows, width = (*getattr(topk_idx, "shape", ()), 0, 0)[:2]
    check("topk_idx", topk_idx, (rows if tokens is None else tokens, width), torch.int64, device)
    if topk_weights is None:
        return
    if isinstance(topk_weights, Tensor) and topk_weights.shape != topk_idx.shape:
        shapes = f"{list(topk_weights.shape)}; allowed is {list(topk_idx.shape)}, as topk_idx"
        raise ShapeError(f"topk_weights is {shapes}")
    check("topk_weights", topk_weights, (rows, width), torch.float32, device)
