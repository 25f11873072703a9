"""Rows that the caller quantised, as DeepEP takes and returns them."""

from __future__ import annotations

import torch
from torch import Tensor

from uccl_ep_train.common.handle import Fp8Rows

Rows = Tensor | tuple[Tensor, Tensor]


def engine_rows(x: Rows) -> Tensor | Fp8Rows:
    """x; its scales may have any strides."""
    if not isinstance(x, tuple):
        return x
    codes, scales = x
    return Fp8Rows(codes, scales if scales.dtype == torch.int32 else scales.contiguous())


def aligned_columns(scales: Tensor) -> Tensor:
    """A copy whose columns lie one after the other, each a multiple of 16 bytes."""
    rows, columns = scales.shape
    there = scales.new_empty(columns, -(-rows // 4) * 4).t()[:rows]
    return there.copy_(scales)
