"""Rows that the caller quantised: with scales as DeepEP takes them, and as the engine does.

Shapes: T rows, H columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.slots import pack_exponents
from uccl_ep_train.errors import ShapeError

_BLOCK = 128  # columns that share a scale
_EXPONENT = 23  # the lowest bit of a float32's exponent

Rows = Tensor | tuple[Tensor, Tensor]


def dense(t: Tensor) -> Tensor:
    """t, or a copy whose elements lie one after the other.

    torch calls t contiguous whatever the stride of a single row or column is, but does not view it as
    elements of another size then.
    """
    behind = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if stride != behind:
            return t.clone(memory_format=torch.contiguous_format)
        behind *= max(size, 1)
    return t


def engine_rows(x: Rows) -> Tensor | Fp8Rows:
    """x, with scales [T, H / 128] float32, contiguous.

    Scales [T, H / 512, rounded up] int32 hold four exponents each (UE8M0), the lowest byte first. Raises
    `ShapeError`.
    """
    if not isinstance(x, tuple):
        return x
    codes, scales = x
    if scales.dtype != torch.int32:
        return Fp8Rows(codes, scales.contiguous())
    blocks = codes.shape[1] // _BLOCK
    wanted = (len(codes), -(-blocks // 4))
    if scales.shape != wanted:
        raise ShapeError(f"x.scales is {tuple(scales.shape)} int32; allowed is {wanted}")
    exponents = dense(scales).view(torch.uint8)[:, :blocks]
    return Fp8Rows(codes, (exponents.to(torch.int32) << _EXPONENT).view(torch.float32))


def caller_rows(rows: Tensor | Fp8Rows, x: Rows) -> Rows:
    """Rows that the engine returned, with scales like those of x. Bytes without a block are 0."""
    if not isinstance(rows, Fp8Rows) or not isinstance(x, tuple) or x[1].dtype != torch.int32:
        return rows
    return rows.codes, pack_exponents(rows.scales)


def aligned_columns(scales: Tensor) -> Tensor:
    """A copy whose columns lie one after the other, each a multiple of 16 bytes."""
    rows, columns = scales.shape
    there = scales.new_empty(columns, -(-rows // 4) * 4).t()[:rows]
    return there.copy_(scales)
