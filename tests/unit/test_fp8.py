"""Claims about the definition of FP8 rows (`uccl_ep_train/fp8.py`), each with a control that would fail.

The definition is checked against things it does not use: exact rational arithmetic, an exhaustive search for
the nearest code, numpy's division, torch's float8 casts (inside +-448, where all versions of torch agree).

Longer than 400 lines because every claim keeps its exact range and the control beside it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from uccl_ep_train import fp8
from uccl_ep_train.errors import ConfigError, DtypeError, ShapeError

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


# ---- codes


def test_codes_decode_to_the_values_of_the_ofp8_table() -> None:
    """sign, 4 exponent bits of bias 7, 3 mantissa bits; in exact arithmetic."""
    decoded = fp8.decode_e4m3(torch.arange(256, dtype=torch.uint8))
    for code in range(256):
        exponent, mantissa = code >> 3 & 0xF, code & 7
        if code & 0x7F == 0x7F:
            assert decoded[code].isnan()
            continue
        value = (
            Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 512)
        )
        assert Fraction(abs(decoded[code].item())) == value
        assert bool(decoded[code].signbit()) == (code >= 0x80)
    assert decoded[0x7E] == 448 and decoded[0x01] == 2.0**-9


def test_codes_agree_with_torch_casts_inside_448() -> None:
    y = grid_of_fp32()
    y = y[y.abs() <= 448]
    assert torch.equal(fp8.encode_e4m3(y), y.to(torch.float8_e4m3fn).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8)
    ours, theirs = fp8.decode_e4m3(codes), codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(ours[finite_codes().long()], theirs[finite_codes().long()])
    assert torch.equal(ours.isnan(), theirs.isnan())


def test_encoding_is_nearest_even_and_saturating_by_exhaustive_search() -> None:
    y = grid_of_fp32()
    table = fp8.decode_e4m3(torch.arange(0x7F, dtype=torch.uint8)).double()
    magnitude = y.abs().double().clamp(max=448.0)
    upper = torch.searchsorted(table, magnitude)  # the first code not below
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = table[upper] - magnitude, magnitude - table[lower]
    even = torch.where(upper % 2 == 0, upper, lower)
    nearest = torch.where(to_upper < to_lower, upper, torch.where(to_upper > to_lower, lower, even))
    expected = nearest + y.signbit().long() * 0x80
    codes = fp8.encode_e4m3(y)
    assert torch.equal(codes.long(), expected)
    # Control: the grid tells ties to even from ties away from zero, and saturation from the NaN code.
    away = torch.where(to_upper <= to_lower, upper, lower) + y.signbit().long() * 0x80
    assert (codes.long() != away).sum() > 100
    assert (y.abs() > 464).any() and not (codes & 0x7F == fp8.E4M3_NAN_CODE).any()


# ---- scales


def test_pow2_scale_is_the_least_power_of_two_that_fits_amax_by_exact_arithmetic() -> None:
    """For every positive finite BF16 amax, and clamped to [2^-117, 2^119]."""
    amax = positive_finite_bf16()
    _, scales = fp8.quantize(blocks_of_one(amax), "pow2")
    for value, scale in zip(amax.tolist(), scales.flatten().tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5, "a power of two"
        fits, half_fits = value <= 448 * scale, value <= 448 * scale / 2  # exact in double
        assert (fits or scale == MAX_CLAMP) and (not half_fits or scale == MIN_CLAMP)
    assert scales.min() == MIN_CLAMP and scales.max() == MAX_CLAMP


def test_pow2_scale_steps_exactly_after_448_times_a_power_of_two() -> None:
    """amax = 448*2^n still has scale 2^n; one BF16 ulp below too; one above has 2^(n+1), up to the clamp."""
    for n in range(-117, 120):
        at = torch.tensor(448.0 * 2.0**n).to(torch.bfloat16)
        ulp = torch.tensor([-1, 0, 1], dtype=torch.int16)
        below_at_above = (at.view(torch.int16) + ulp).view(torch.bfloat16)
        codes, scales = fp8.quantize(blocks_of_one(below_at_above), "pow2")
        assert scales.flatten().tolist() == [2.0**n, 2.0**n, min(2.0 ** (n + 1), MAX_CLAMP)]
        # 446 rounds up to 448; 450 is 225 of the doubled scale, where 224 is nearer than 240.
        assert fp8.decode_e4m3(codes[:, 0]).tolist() == [448.0, 448.0, 224.0 if n < 119 else 448.0]


def test_fp32_scale_is_one_ieee_division_and_so_are_the_codes() -> None:
    x = blocks_with_amax(positive_finite_bf16())
    codes, scales = fp8.quantize(x, "fp32")
    amax = x.float().abs().amax(dim=1).numpy()
    expected_scales = np.maximum(amax / np.float32(448), np.float32(2.0**-117))
    assert np.array_equal(scales.flatten().numpy(), expected_scales)
    divided = torch.from_numpy(x.float().numpy() / expected_scales[:, None])
    assert torch.equal(codes, fp8.encode_e4m3(divided))
    # Control: multiplying by a rounded reciprocal, of 448 or of the scale, is another result on this data.
    assert not np.array_equal(amax * (np.float32(1) / np.float32(448)), amax / np.float32(448))
    multiplied = torch.from_numpy(x.float().numpy() * (np.float32(1) / expected_scales)[:, None])
    assert not torch.equal(codes, fp8.encode_e4m3(multiplied))


@pytest.mark.parametrize("mode", fp8.SCALE_MODES)
def test_the_lower_clamp_sets_in_below_448_times_2_to_minus_117(mode: str) -> None:
    """Smaller blocks keep scale 2^-117, so their codes get subnormal and the tiniest values round to zero."""
    edge = torch.tensor(448.0 * MIN_CLAMP).to(torch.bfloat16)
    smallest, half_step, above_half_step = bf16(0x0001), bf16(0x0040), bf16(0x0041)
    values = torch.stack([edge, edge / 2, smallest, half_step, above_half_step, -half_step])
    codes, scales = fp8.quantize(blocks_of_one(values), mode)
    assert (scales == MIN_CLAMP).all()
    assert fp8.decode_e4m3(codes[:, 0]).tolist() == [448.0, 224.0, 0.0, 0.0, 2.0**-9, 0.0]
    # 0x0041 is a BF16 subnormal: with denormals-are-zero it would vanish.
    assert fp8.dequantize(codes, scales)[4, 0].item() == 2.0**-126
    assert fp8.dequantize(codes, scales)[5, 0].view(torch.int16).item() == -0x8000
    above = bf16(int(edge.view(torch.int16)) + 1)
    assert (fp8.quantize(blocks_of_one(above.reshape(1)), mode)[1] > MIN_CLAMP).all()


def test_the_upper_clamp_saturates_instead_of_giving_inf() -> None:
    """Above 448*2^119 the pow2 scale stays 2^119 and values saturate; unclamped, the largest would be Inf."""
    largest = bf16(0x7F7F)
    result = round_trip(blocks_of_one(torch.stack([largest, -largest])), "pow2")
    assert result[0].unique().tolist() == [448 * MAX_CLAMP] and result[1].unique().tolist() == [
        -448 * MAX_CLAMP
    ]
    unclamped = torch.tensor(2.0**120)
    assert (fp8.decode_e4m3(fp8.encode_e4m3(largest.float() / unclamped)) * unclamped).isinf()
    # The fp32 scale needs no clamp: the largest value comes back.
    assert same_bits(round_trip(blocks_of_one(largest.reshape(1)), "fp32")[0, 0], largest)


# ---- special blocks


@pytest.mark.parametrize("mode", fp8.SCALE_MODES)
def test_zero_blocks_have_scale_one_and_keep_the_signs_of_zero(mode: str) -> None:
    x = torch.zeros(2, fp8.BLOCK, dtype=torch.bfloat16)
    x[1, ::2] = -0.0
    codes, scales = fp8.quantize(x, mode)
    assert (scales == 1.0).all()
    assert (codes[0] == 0).all() and codes[1, :4].tolist() == [0x80, 0, 0x80, 0]
    assert same_bits(fp8.dequantize(codes, scales), x)
    # Control: a block with something in it has another scale, and its zeros keep their signs too.
    x[1, 5] = 3.0
    codes, scales = fp8.quantize(x, mode)
    assert scales[1] != 1.0 and codes[1, :4].tolist() == [0x80, 0, 0x80, 0]


@pytest.mark.parametrize("mode", fp8.SCALE_MODES)
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF], ids=hex)
def test_a_block_with_nan_or_inf_is_all_canonical_nan_and_its_neighbours_are_not(
    mode: str, bits: int
) -> None:
    x = blocks_with_amax(bf16(torch.tensor([0x4000, 0x4100, 0x4200]))).reshape(1, -1)
    clean_codes, clean_scales = fp8.quantize(x, mode)
    x[0, fp8.BLOCK + 9] = bf16(bits)
    codes, scales = fp8.quantize(x, mode)
    poisoned = slice(fp8.BLOCK, 2 * fp8.BLOCK)
    assert (codes[0, poisoned] == 0x7F).all() and scales[0, 1] == 1.0
    for dtype, pattern in ((torch.bfloat16, bf16(0x7FC0)), (torch.float32, torch.tensor([0x7FC00000]).int())):
        values = fp8.dequantize(codes, scales, dtype)[0, poisoned]
        assert same_bits(values, pattern.view(dtype).expand(fp8.BLOCK).contiguous())
    others = torch.ones(3 * fp8.BLOCK, dtype=torch.bool)
    others[poisoned] = False
    assert torch.equal(codes[0, others], clean_codes[0, others])
    assert torch.equal(scales[0, [0, 2]], clean_scales[0, [0, 2]])
    assert (clean_codes[0, poisoned] != 0x7F).all()


def test_any_nan_code_dequantises_to_the_canonical_nan() -> None:
    codes = torch.full((1, fp8.BLOCK), 0xFF, dtype=torch.uint8)
    values = fp8.dequantize(codes, torch.tensor([[-2.0]]))
    assert same_bits(values, bf16(0x7FC0).expand(1, fp8.BLOCK).contiguous())
    # Control: an uncanonical NaN stays one in a copy, so the comparison above can tell.
    assert not same_bits(bf16(0xFFC0).clone(), bf16(0x7FC0))


@pytest.mark.parametrize("mode", fp8.SCALE_MODES)
def test_finite_values_stay_finite_and_non_finite_ones_do_not(mode: str) -> None:
    values = all_bf16()
    result = round_trip(blocks_of_one(values), mode)[:, 0]
    assert torch.equal(result.isfinite(), values.isfinite())
    assert not result.isinf().any()
    assert round_trip(blocks_with_amax(positive_finite_bf16()), mode).isfinite().all()


# ---- what the power-of-two scale promises


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


# ---- interface


def test_dequantising_to_bf16_rounds_the_fp32_product_to_nearest_even() -> None:
    x = blocks_with_amax(positive_finite_bf16())
    codes, scales = fp8.quantize(x, "fp32")
    wide = fp8.dequantize(codes, scales, torch.float32)
    bits = wide.view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    narrow = fp8.dequantize(codes, scales).view(torch.int16).long() & 0xFFFF
    assert torch.equal(narrow, rounded)
    assert not torch.equal(narrow, bits >> 16), "control: truncation differs on this data"


@pytest.mark.parametrize(("num_rows", "hidden"), [(0, 128), (0, 0), (3, 0), (1, 128), (5, 640)])
def test_any_number_of_rows_and_blocks(num_rows: int, hidden: int) -> None:
    x = torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    codes, scales = fp8.quantize(x, "pow2")
    assert codes.shape == (num_rows, hidden) and scales.shape == (num_rows, hidden // 128)
    by_block = round_trip(x.reshape(-1, 128), "pow2")
    assert same_bits(fp8.dequantize(codes, scales), by_block.reshape(num_rows, hidden))


def test_wire_row_bytes_fill_the_scales_up_to_sixteen_bytes() -> None:
    assert [fp8.wire_row_bytes(h, "fp8") for h in (128, 512, 640, 7168)] == [144, 528, 672, 7168 + 224]
    assert fp8.wire_row_bytes(7168, "bf16") == 14336 and fp8.wire_row_bytes(7168, "fp32") == 28672
    for hidden, wire in ((100, "fp8"), (128, "fp16")):
        with pytest.raises(ConfigError, match=str(hidden)):
            fp8.wire_row_bytes(hidden, wire)


def test_what_cannot_work_is_refused_by_name() -> None:
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    codes, scales = fp8.quantize(x)
    with pytest.raises(DtypeError, match="float32"):
        fp8.quantize(x.float())
    with pytest.raises(ShapeError, match="128"):
        fp8.quantize(x[:, :100])
    with pytest.raises(ConfigError, match="e8m0"):
        fp8.quantize(x, "e8m0")
    with pytest.raises(DtypeError, match="float16"):
        fp8.dequantize(codes, scales, torch.float16)
    with pytest.raises(ShapeError):
        fp8.dequantize(codes, scales[:, :1])
