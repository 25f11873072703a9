"""Scales as exponents (UE8M0): powers of two, of which only the biased exponents are kept, four in an int32.

Shapes: R rows, B blocks of columns, W = B / 4, rounded up.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 23  # the lowest bit of a float32's exponent
_PER_WORD = 4  # exponents


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


def num_words(blocks: int) -> int:
    """W."""
    return -(-blocks // _PER_WORD)


def pack_exponents(scales: Tensor) -> Tensor:
    """[R, B] float32, powers of two, to [R, W] int32.

    A word holds the biased exponents of four blocks, the lowest byte first. Bytes without a block are 0.
    """
    exponents = scales.view(torch.int32) >> _EXPONENT
    num_rows, blocks = scales.shape
    packed = exponents.new_zeros((num_rows, _PER_WORD * num_words(blocks)), dtype=torch.uint8)
    packed[:, :blocks] = exponents
    return packed.view(torch.int32)


def unpack_exponents(words: Tensor, blocks: int) -> Tensor:
    """[R, W] int32 of any strides to [R, B] float32, contiguous. A byte of 0 is 0."""
    exponents = dense(words).view(torch.uint8)[:, :blocks]
    return (exponents.to(torch.int32) << _EXPONENT).view(torch.float32)
