"""Rows as DeepEP takes and returns them: of any width, also quantised by the caller."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.deep_ep.checks import columns_of
from uccl_ep_train.settings.checks import HIDDEN_UNIT

Rows = Tensor | tuple[Tensor, Tensor]


def widened(x: Tensor) -> Tensor:
    """x [T, H], with columns of zeros up to what an engine takes."""
    missing = -x.shape[1] % HIDDEN_UNIT if isinstance(x, Tensor) and x.dim() == 2 else 0
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


@overload
def cut(rows: Tensor, like: Tensor) -> Tensor: ...
@overload
def cut(rows: Rows, like: Rows) -> Rows: ...
def cut(rows: Rows, like: Rows) -> Rows:
    """rows, without columns that `like` lacks."""
    if isinstance(rows, tuple) or isinstance(like, tuple) or rows.shape[1] == like.shape[1]:
        return rows
    return rows[:, : like.shape[1]].contiguous()


def engine_rows(x: Rows) -> Tensor | Fp8Rows:
    """x as an engine takes it; its scales may have any strides."""
    columns_of("x", x, quantised=True)
    if not isinstance(x, tuple):
        return widened(x)
    codes, scales = x
    return Fp8Rows(codes, scales if scales.dtype == torch.int32 else scales.contiguous())


def aligned_columns(scales: Tensor) -> Tensor:
    """A copy whose columns lie one after the other, each a multiple of 16 bytes."""
    rows, columns = scales.shape
    there = scales.new_empty(columns, -(-rows // 4) * 4).t()[:rows]
    return there.copy_(scales)
