"""What the power-of-two scales of FP8 rows promise: exact rows, which quantise to the same values again."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tests.unit.fp8_blocks import (
    bf16,
    blocks_of_one,
    blocks_with_amax,
    finite_codes,
    positive_finite_bf16,
    round_trip,
    same_bits,
)
from uccl_ep_train.oracle import fp8


def test_pow2_dequantisation_is_exact_for_every_code_and_every_scale() -> None:
    """float(code) * scale is a normal BF16 number (or zero) over the whole clamp range, and only there."""

    def exact_and_normal(exponent: int) -> bool:
        scale = torch.tensor(2.0**exponent, dtype=torch.float64)
        product = fp8.decode_e4m3(finite_codes()).double() * scale
        nonzero = product[product != 0].abs()
        in_bf16 = torch.equal(product.to(torch.bfloat16).double(), product)
        return in_bf16 and bool((nonzero >= 2.0**-126).all())

    assert all(exact_and_normal(exponent) for exponent in range(-117, 120))
    assert not exact_and_normal(-118) and not exact_and_normal(120)
    # ... and dequantize gives that product.
    scales = torch.tensor([[2.0**exponent] for exponent in range(-117, 120)])
    codes = finite_codes()[: 2 * fp8.BLOCK - 2].repeat(2)[: 2 * fp8.BLOCK].reshape(2, fp8.BLOCK)
    for half in codes:
        rows = half.expand(len(scales), -1)
        product = fp8.decode_e4m3(rows).double() * scales.double()
        assert torch.equal(fp8.dequantize(rows, scales).double(), product)
    # Control: with fp32 scales it is not exact.
    x = blocks_with_amax(positive_finite_bf16())
    codes, scales = fp8.quantize(x, "fp32")
    assert not torch.equal(
        fp8.dequantize(codes, scales).double(), fp8.decode_e4m3(codes).double() * scales.double()
    )


@cache
def all_ranges() -> Tensor:
    """Finite blocks: every mantissa of amax at the 25 exponents next to either edge and some between."""
    exponents = [*range(25), 64, 100, 127, 128, 190, *range(230, 255)]
    bits = [torch.arange(exponent << 7, (exponent + 1) << 7) for exponent in exponents]
    amax = bf16(torch.cat(bits)[1:])
    return torch.cat([blocks_with_amax(amax, 1), blocks_with_amax(amax, 2), blocks_of_one(amax)])


def test_pow2_quantising_again_gives_the_same_values_for_every_finite_block() -> None:
    """Range: all finite BF16 blocks, the clamped and the all-zero ones included.

    The codes may differ: where amax rounded down to 224 * scale, the second scale is half and the codes are
    doubled. At the lower edge (amax <= 2^-127, half the smallest step of the clamped scale) the block becomes
    all zeros, with scale 1.
    """
    x = all_ranges()
    once_codes, once_scales = fp8.quantize(x, "pow2")
    once = fp8.dequantize(once_codes, once_scales)
    twice_codes, twice_scales = fp8.quantize(once, "pow2")
    assert same_bits(fp8.dequantize(twice_codes, twice_scales), once)
    halved = (twice_scales == once_scales / 2).flatten()
    vanished = (once == 0).all(dim=1)
    assert torch.equal(twice_scales[vanished], torch.ones_like(twice_scales[vanished]))
    assert torch.equal(vanished, x.float().abs().amax(dim=1) <= 2.0**-127)
    assert halved.any() and vanished.any()
    same = ~halved & ~vanished
    assert torch.equal(twice_codes[same], once_codes[same])
    assert torch.equal(twice_scales[same], once_scales[same])
    # Control: values that came from fp32 scales are not on a grid of power-of-two scales.
    other = round_trip(x, "fp32")
    assert not same_bits(round_trip(other, "pow2"), other)


def transformer_engine_values(x: Tensor, subnormals: bool = True) -> tuple[Tensor, Tensor]:
    """(values, 1/multiplier) after TransformerEngine's 1x128 block quantisation with power-of-two scales.

    The multiplier is 448/amax in fp32 with the mantissa cleared; where that overflows, the largest BF16 with
    the mantissa cleared, 2^127; for amax 0, 1. ``subnormals=False``: with subnormal inverses flushed.
    """
    amax = x.float().abs().amax(dim=1, keepdim=True)
    multiplier = torch.full_like(amax, 448.0) / amax
    multiplier = torch.where(multiplier.isinf(), bf16(0x7F7F).float(), multiplier)
    multiplier = (multiplier.view(torch.int32) & 0x7F800000).view(torch.float32)
    multiplier = torch.where(amax == 0, 1.0, multiplier)
    inverse = torch.ones_like(multiplier) / multiplier
    if not subnormals:
        inverse = torch.where(inverse < 2.0**-126, 0.0, inverse)
    return fp8.decode_e4m3(fp8.encode_e4m3(x.float() * multiplier)) * inverse, inverse


def test_transformer_engine_finds_the_same_values_in_our_dequantised_rows() -> None:
    """Range: every finite block; where subnormals are flushed, those with amax 0 or > 448 * 2^-127.

    That lower edge comes from TransformerEngine's 1/multiplier, which is 2^-127 (subnormal) for an amax (of
    the dequantised row) <= 448 * 2^-127. Nothing is lost at the upper edge: saturated blocks end there.
    """
    once = round_trip(all_ranges(), "pow2")
    values, _ = transformer_engine_values(once)
    assert torch.equal(values, once.float())

    amax = once.float().abs().amax(dim=1)
    flushed, inverse = transformer_engine_values(once, subnormals=False)
    safe = (amax == 0) | (amax > 448 * 2.0**-127)
    assert torch.equal(flushed[safe], once[safe].float())
    assert (flushed[~safe] == 0).all() and (inverse[~safe] == 0).all() and (~safe).any()
    # Both sides of the edge exist among our rows: 448 * 2^-127 = 224 * 2^-126, and the next value above.
    assert (amax == 224 * 2.0**-126).any() and (amax == 240 * 2.0**-126).any()
    # Control: rows dequantised with fp32 scales change under TransformerEngine.
    once = round_trip(all_ranges(), "fp32")
    assert not torch.equal(transformer_engine_values(once)[0], once.float())


def test_expert_inputs_equal_transformer_engines_own_quantisation_of_the_original() -> None:
    """Range: 224 * 2^-117 < amax <= 448 * 2^119 (and all-zero blocks); no further at either end.

    There, block-FP8 training cannot tell FP8 dispatch from BF16 dispatch. Below, our clamped scale has
    coarser steps; above, it has finer ones, and we saturate where TransformerEngine overflows.
    """
    x = all_ranges()
    amax = x.float().abs().amax(dim=1)
    lower, upper = 224 * 2.0**-117, 448 * 2.0**119
    inside = (amax > lower) & (amax <= upper)
    ours, theirs = round_trip(x, "pow2").float(), transformer_engine_values(x)[0]
    assert torch.equal(ours[inside], theirs[inside])
    zeros = torch.zeros(1, fp8.BLOCK, dtype=torch.bfloat16)
    assert torch.equal(round_trip(zeros, "pow2").float(), transformer_engine_values(zeros)[0])
    # The edges are sharp: blocks with amax at the lower one, and one ulp above the upper one, can differ.
    at_lower = torch.full((1, fp8.BLOCK), lower, dtype=torch.bfloat16)
    at_lower[0, 1] = 2.0**-127
    assert round_trip(at_lower, "pow2")[0, 1] == 0.0
    assert transformer_engine_values(at_lower)[0][0, 1] == 2.0**-127
    above_upper = blocks_of_one(bf16(torch.tensor([0x7F61])))
    above_upper[0, 1] = 2.0**110
    assert bf16(0x7F60).item() == upper
    assert round_trip(above_upper, "pow2")[0, 1] == 2.0**110
    assert transformer_engine_values(above_upper)[0][0, 1] == 0.0
    assert transformer_engine_values(blocks_of_one(bf16(torch.tensor([0x7F7F]))))[0].isinf().all()
