"""Claims about the native FP8 conversion: it equals the definition in `oracle/fp8.py` in every bit.

The controls show that the blocks compared here reveal the mistakes that fast conversions make: ties away from
zero, a reciprocal instead of a division, subnormals flushed to zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from uccl_ep_train import _native
from uccl_ep_train.core import native
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.oracle import fp8

GUARD = 256  # elements before and after each output, which must stay as they were
MODES = pytest.mark.parametrize("mode", fp8.SCALE_MODES)


def bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def guarded(num_elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the whole buffer as bytes of 0xA5, the output inside it)."""
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    whole = torch.full(((num_elements + 2 * GUARD) * element_bytes,), 0xA5, dtype=torch.uint8)
    return whole, whole.view(dtype)[GUARD : GUARD + num_elements]


def assert_guards_intact(whole: Tensor, inside: Tensor) -> None:
    edge = GUARD * inside.element_size()
    assert (whole[:edge] == 0xA5).all() and (whole[-edge:] == 0xA5).all(), "wrote outside of the output"


def native_quantize(x_TH: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    num_rows, hidden = x_TH.shape
    x_TH = x_TH.contiguous()
    whole_codes, codes = guarded(num_rows * hidden, torch.uint8)
    whole_scales, scales = guarded(num_rows * -(-hidden // fp8.BLOCK), torch.float32)
    _native.quantize_fp8(x_TH.data_ptr(), num_rows, hidden, mode, codes.data_ptr(), scales.data_ptr())
    assert_guards_intact(whole_codes, codes)
    assert_guards_intact(whole_scales, scales)
    return codes.reshape(num_rows, hidden), scales.reshape(num_rows, -(-hidden // fp8.BLOCK))


def native_dequantize(codes_TH: Tensor, scales_TB: Tensor) -> Tensor:
    num_rows, hidden = codes_TH.shape
    codes_TH, scales_TB = codes_TH.contiguous(), scales_TB.contiguous()
    whole, out = guarded(num_rows * hidden, torch.bfloat16)
    _native.dequantize_fp8(codes_TH.data_ptr(), scales_TB.data_ptr(), num_rows, hidden, out.data_ptr())
    assert_guards_intact(whole, out)
    return out.reshape(num_rows, hidden)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def assert_native_is_the_definition(x_TH: Tensor, mode: str) -> None:
    codes, scales = fp8.quantize(x_TH, mode)
    native_codes, native_scales = native_quantize(x_TH, mode)
    assert same_bits(native_scales, scales)
    assert torch.equal(native_codes, codes)
    assert same_bits(native_dequantize(codes, scales), fp8.dequantize(codes, scales))


# ---- what is compared


def values_alone() -> Iterator[Tensor]:
    """All 65536 patterns, one to a block, 4096 blocks at a time."""
    for bits in torch.arange(65536).split(4096):
        yield bf16(bits).unsqueeze(1).expand(-1, fp8.BLOCK).contiguous()


def values_mixed() -> Iterator[Tensor]:
    """All patterns: neighbours together; shuffled; the finite ones shuffled, so no NaN hides any."""
    rng = torch.Generator().manual_seed(0)
    bits = torch.arange(65536)
    finite = bits[bf16(bits).isfinite()]
    yield bf16(bits).reshape(-1, fp8.BLOCK)
    yield bf16(bits[torch.randperm(len(bits), generator=rng)]).reshape(-1, 2 * fp8.BLOCK)
    shuffled = torch.cat([finite[torch.randperm(len(finite), generator=rng)] for _ in range(4)])
    yield bf16(shuffled).reshape(-1, fp8.BLOCK)


def random_blocks_at_every_exponent() -> Tensor:
    """[255 * 8, 128]: the largest at each exponent of BF16, subnormals too, others 0 to 20 binades below."""
    rng = torch.Generator().manual_seed(1)
    top = torch.arange(255).repeat_interleave(8).unsqueeze(1)
    below = torch.randint(0, 21, (len(top), fp8.BLOCK), generator=rng)
    below[:, 63] = 0
    exponent = (top - below).clamp(min=0)
    mantissa = torch.randint(0, 128, exponent.shape, generator=rng)
    sign = torch.randint(0, 2, exponent.shape, generator=rng)
    return bf16(sign << 15 | exponent << 7 | mantissa)


@MODES
def test_every_bf16_value_alone_in_its_block(mode: str) -> None:
    for x_TH in values_alone():
        assert_native_is_the_definition(x_TH, mode)


@MODES
def test_every_bf16_value_among_others(mode: str) -> None:
    for x_TH in values_mixed():
        assert_native_is_the_definition(x_TH, mode)


@MODES
def test_random_blocks_at_every_exponent(mode: str) -> None:
    assert_native_is_the_definition(random_blocks_at_every_exponent(), mode)


@MODES
@pytest.mark.parametrize("hidden", [32, 96, 128, 160, 256, 384, 640, 2880, 7168])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 17])
def test_every_shape_writes_its_output_and_nothing_else(num_rows: int, hidden: int, mode: str) -> None:
    rng = torch.Generator().manual_seed(hidden + num_rows)
    assert_native_is_the_definition(torch.randn(num_rows, hidden, generator=rng).to(torch.bfloat16), mode)


@MODES
@pytest.mark.parametrize("position", [0, 1, 15, 16, 63, 64, 126, 127])
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7F81, 0xFFC0], ids=hex)
def test_nan_or_inf_anywhere_in_a_block_poisons_that_block_alone(bits: int, position: int, mode: str) -> None:
    x = random_blocks_at_every_exponent()[::40].reshape(-1, 3 * fp8.BLOCK).clone()
    x[:, fp8.BLOCK + position] = bf16(torch.tensor(bits))
    assert_native_is_the_definition(x, mode)
    poisoned = native_dequantize(*native_quantize(x, mode)).isnan().reshape(-1, 3, fp8.BLOCK)
    assert poisoned[:, 1].all() and not poisoned[:, 0].any() and not poisoned[:, 2].any()


def test_every_code_dequantises_with_every_scale_that_quantising_can_give() -> None:
    """All 256 codes (two are NaN) by all powers of two of the clamp range and by unrounded scales."""
    exponents = torch.arange(fp8.MIN_SCALE_EXPONENT, fp8.MAX_SCALE_EXPONENT + 1)
    pow2 = torch.pow(2.0, exponents.double()).float()
    _, unrounded = fp8.quantize(random_blocks_at_every_exponent(), "fp32")
    scales = torch.cat([pow2, unrounded.flatten()]).unsqueeze(1)
    for codes in torch.arange(256, dtype=torch.uint8).split(fp8.BLOCK):
        codes_TH = codes.expand(len(scales), -1).contiguous()
        assert same_bits(native_dequantize(codes_TH, scales), fp8.dequantize(codes_TH, scales))


# ---- controls: the comparisons above have the power to notice


def steps_of(x_TH: Tensor, mode: str) -> Tensor:
    """x / scale of finite blocks."""
    _, scales = fp8.quantize(x_TH, mode)
    return (x_TH.float().reshape(-1, fp8.BLOCK) / scales.reshape(-1, 1)).reshape(x_TH.shape)


@MODES
def test_control_ties_away_from_zero_would_be_noticed(mode: str) -> None:
    """Adding half a step and truncating, the usual shortcut, gives other codes on blocks compared above."""
    x = list(values_mixed())[2]
    y = steps_of(x, mode)
    nudged = torch.nextafter(y, torch.full_like(y, torch.inf).copysign(y))  # ties now round away from zero
    assert (fp8.encode_e4m3(nudged) != fp8.quantize(x, mode)[0]).any()


def test_control_a_reciprocal_instead_of_a_division_would_be_noticed() -> None:
    x = random_blocks_at_every_exponent()
    codes, scales = fp8.quantize(x, "fp32")
    reciprocal = torch.ones_like(scales) / scales
    assert (fp8.encode_e4m3(x.float() * reciprocal) != codes).any()
    amax = x.float().abs().amax(dim=1, keepdim=True)
    assert (amax * (torch.ones_like(amax) / 448.0) != amax / torch.full_like(amax, 448.0)).any()


@MODES
def test_control_flushed_subnormals_would_be_noticed(mode: str) -> None:
    flushed_matters = 0
    for x in [*values_mixed(), random_blocks_at_every_exponent()]:
        flushed = torch.where(x.float().abs() < 2.0**-126, torch.zeros_like(x), x)
        flushed_matters += int(
            (fp8.quantize(x, mode)[0] & 0x7F != fp8.quantize(flushed, mode)[0] & 0x7F).sum()
        )
    assert flushed_matters > 10


# ------------------------------------------------------------------------------------ row formats


def test_row_formats_are_those_of_the_definition() -> None:
    assert {(entry.name, entry.scale) for entry in native.row_formats()} == {
        ("bf16", ""), ("fp32", ""), *(("fp8", mode) for mode in fp8.SCALE_MODES), ("mxfp8", ""),
    }  # fmt: skip
    for entry in native.row_formats():
        name = "fp8" if entry.name == "mxfp8" else entry.name  # four exponents are as long as a scale
        for hidden in range(32, 40 * fp8.BLOCK, 32):
            assert entry.row_bytes(hidden) == fp8.wire_row_bytes(hidden, name)
            assert entry.num_scales(hidden) == (-(-hidden // fp8.BLOCK) if name == "fp8" else 0)
    # Negative control: scales that are not filled up are noticed.
    entry = native.row_format("fp8", "pow2")
    assert fp8.wire_row_bytes(640, "fp8") != 640 + entry.num_scales(640) * entry.scale_bytes


def test_an_unknown_row_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"fp4.*allowed is bf16 \| fp32 \| fp8"):
        native.row_format("fp4", "pow2")
