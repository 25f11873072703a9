"""Blocks of values for claims about FP8 rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from uccl_ep_train.oracle import fp8

MAX_CLAMP, MIN_CLAMP = 2.0**119, 2.0**-117


def bf16(bits: Tensor | int) -> Tensor:
    """The bfloat16 values with the given 16-bit patterns."""
    return torch.as_tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def all_bf16() -> Tensor:
    return bf16(torch.arange(65536))


def positive_finite_bf16() -> Tensor:
    return bf16(torch.arange(1, 0x7F80))


def blocks_of_one(values: Tensor) -> Tensor:
    """[n, 128] with one value per block."""
    return values.unsqueeze(1).expand(-1, fp8.BLOCK).contiguous()


def blocks_with_amax(amax: Tensor, seed: int = 0) -> Tensor:
    """[n, 128]: amax (bfloat16 [n], positive) once, the rest random, both signs, up to 20 binades below."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(amax), fp8.BLOCK)
    fraction = torch.rand(shape, generator=generator, dtype=torch.float64) * 2.0 - 1.0
    fraction *= 2.0 ** -torch.randint(0, 21, shape, generator=generator).double()
    x = (amax.double().unsqueeze(1) * fraction).to(torch.bfloat16)
    x[:, 77] = amax
    return x


def round_trip(x: Tensor, mode: str) -> Tensor:
    return fp8.dequantize(*fp8.quantize(x, mode))


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def finite_codes() -> Tensor:
    """The 254 codes that are numbers."""
    return torch.tensor([c for c in range(256) if c & 0x7F != fp8.E4M3_NAN_CODE], dtype=torch.uint8)


def grid_of_fp32() -> Tensor:
    """Where rounding could go wrong: codes, midpoints, their neighbours; random and BF16 values."""
    values = fp8.decode_e4m3(torch.arange(0x7F, dtype=torch.uint8)).double()
    midpoints = ((values[1:] + values[:-1]) / 2).float()
    centres = torch.cat([values.float(), midpoints])
    up, down = (torch.nextafter(centres, torch.tensor(to)) for to in (math.inf, -math.inf))
    random = torch.rand(20000, generator=torch.Generator().manual_seed(1)) * 500
    bf16_values = positive_finite_bf16().float()
    y = torch.cat([centres, up, down.clamp(min=0), random, bf16_values])
    return torch.cat([y, -y])
