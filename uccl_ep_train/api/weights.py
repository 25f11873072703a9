"""Sums of a few float32 values beside the rows that a combine sums."""

from __future__ import annotations

import torch
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer
from uccl_ep_train.common.handle import DispatchHandle
from uccl_ep_train.common.opaque import opaque
from uccl_ep_train.core import routing
from uccl_ep_train.errors import DtypeError
from uccl_ep_train.settings.checks import FP8_BLOCK


@opaque
def combine_weights(buffer: Buffer, weights: Tensor, handle: DispatchHandle) -> Tensor:
    """Sums, for each token of this rank, the weights beside the rows that `Buffer.combine` sums.

    An operation of its own, whose sums have the order of those of rows. Gradients of a dispatch's weights do
    not need it: they return with those of x.

    weights  [R, W] float32, contiguous, W from 1 to `config.hidden`, equal on all ranks: another multiple of
             128 above it is a `RankMismatchError`, columns that a rank lacks up to it count as zeros. What
             lies beside padding is ignored
    handle   of the dispatch

    Returns [T, W] float32, zero for tokens without experts. Not differentiable. Raises what `Buffer.combine`
    raises; `DtypeError`, too, if the buffer was created with max_dtype = "bf16".
    """
    if not isinstance(buffer, Buffer):
        raise DtypeError(f"buffer is {type(buffer).__name__}; allowed is a Buffer")
    with buffer.preparing("combine"):
        columns = routing.check_row_weights(weights, handle, buffer.config, buffer.device)
        width = min(columns + -columns % FP8_BLOCK, buffer.config.hidden)
        rows = torch.nn.functional.pad(weights.detach(), (0, width - columns))
    return buffer.combine(rows, handle)[:, :columns].contiguous()
