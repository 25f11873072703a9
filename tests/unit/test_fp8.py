"""Claims about the definition of FP8 rows (`oracle/fp8.py`), each with a control that would fail.

The definition is checked against things it does not use: exact rational arithmetic, an exhaustive search for
the nearest code, numpy's division, torch's float8 casts (inside +-448, where all versions of torch agree).
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.unit.fp8_blocks import (
    MAX_CLAMP,
    MIN_CLAMP,
    all_bf16,
    bf16,
    blocks_of_one,
    blocks_with_amax,
    finite_codes,
    grid_of_fp32,
    positive_finite_bf16,
    round_trip,
    same_bits,
)
from uccl_ep_train.errors import ConfigError, DtypeError, ShapeError
from uccl_ep_train.oracle import fp8

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


@pytest.mark.parametrize(
    ("num_rows", "hidden"), [(0, 128), (0, 0), (3, 0), (1, 128), (5, 640), (4, 2880), (3, 7)]
)
def test_any_number_of_rows_and_blocks(num_rows: int, hidden: int) -> None:
    x = torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    codes, scales = fp8.quantize(x, "pow2")
    assert codes.shape == (num_rows, hidden) and scales.shape == (num_rows, -(-hidden // 128))
    filled = torch.nn.functional.pad(x, (0, -hidden % 128))  # the last block's zeros change nothing
    by_block = round_trip(filled.reshape(-1, 128), "pow2").reshape(filled.shape)
    assert same_bits(fp8.dequantize(codes, scales), by_block[:, :hidden].contiguous())


def test_wire_row_bytes_fill_the_scales_up_to_sixteen_bytes() -> None:
    assert [fp8.wire_row_bytes(h, "fp8") for h in (128, 512, 640, 7168)] == [144, 528, 672, 7168 + 224]
    assert [fp8.wire_row_bytes(h, "fp8") for h in (32, 160, 2880)] == [48, 176, 2880 + 96]
    assert fp8.wire_row_bytes(7168, "bf16") == 14336 and fp8.wire_row_bytes(7168, "fp32") == 28672
    with pytest.raises(ConfigError, match="fp16"):
        fp8.wire_row_bytes(128, "fp16")


def test_what_cannot_work_is_refused_by_name() -> None:
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    codes, scales = fp8.quantize(x)
    with pytest.raises(DtypeError, match="float32"):
        fp8.quantize(x.float())
    with pytest.raises(ShapeError, match="256"):
        fp8.quantize(x[0])
    with pytest.raises(ConfigError, match="e8m0"):
        fp8.quantize(x, "e8m0")
    with pytest.raises(DtypeError, match="float16"):
        fp8.dequantize(codes, scales, torch.float16)
    with pytest.raises(ShapeError):
        fp8.dequantize(codes, scales[:, :1])
