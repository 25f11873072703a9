"""FP8 rows as they travel: e4m3 codes with one fp32 scale per 1x128 block.

Plain torch, written to be read: it is the definition that the native backends must match bit for bit.
Torch's own float8 casts are not used, because what they do beyond 448 and with NaN differs between versions.

Sources of the formulas:

* the codes: OCP 8-bit Floating Point Specification (OFP8) rev. 1.0, format E4M3 ("e4m3fn"): sign, 4 exponent
  bits with bias 7, 3 mantissa bits, subnormals in steps of 2^-9, largest finite value 448 (code 0x7E), no
  infinities, NaN is S.1111.111 (codes 0x7F and 0xFF);
* the power-of-two scale: TransformerEngine's ``Float8BlockScaling``, which multiplies by 448/amax with the
  mantissa bits cleared, that is by 2^-ceil(log2(amax/448)).

Legend of the shape suffixes: T rows (tokens), H hidden size, B = H/128 blocks of a row, N the 128 elements of
a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uccl_ep_train.errors import ConfigError, DtypeError, ShapeError

BLOCK = 128
E4M3_MAX = 448.0
E4M3_MAX_CODE = 0x7E
E4M3_NAN_CODE = 0x7F

# The smallest non-zero code is 2^-9, so 2^-117 keeps every product code * scale at 2^-126 or above: a normal
# number, in BF16 as in fp32. The largest is 448 = 1.75 * 2^8, so 2^119 keeps it below 2^128.
MIN_SCALE_EXPONENT = -117
MAX_SCALE_EXPONENT = 119

_FP32_BIAS = 127
_FP32_MANTISSA_BITS = 23
_CANONICAL_NAN = {torch.bfloat16: (torch.int16, 0x7FC0), torch.float32: (torch.int32, 0x7FC00000)}


def quantize(x_TH: Tensor, scale_mode: str = "pow2") -> tuple[Tensor, Tensor]:
    """Quantise BF16 rows to e4m3 with one scale per 1x128 block.

    Args:
        x_TH: bfloat16 [T, H], any H and T. The last block of a row may be shorter.
        scale_mode: ``"pow2"``: scale = 2^ceil(log2(amax/448)), clamped to [2^-117, 2^119].
            ``"fp32"``: scale = amax/448 (one IEEE division), at least 2^-117.

    Returns:
        ``(codes_TH, scales_TB)``: uint8 [T, H] and float32 [T, ceil(H / 128)]. A code is e4m3(x / scale): one
        IEEE fp32 division, then round to nearest even, saturating at +-448. -0.0 keeps its sign. An all-zero
        block has scale 1.0. A block with a NaN or an Inf has scale 1.0 and only codes 0x7F.

    Raises:
        DtypeError: x is not bfloat16.
        ShapeError: x is not [T, H].
        ConfigError: the scale mode is unknown.
    """
    if x_TH.dtype != torch.bfloat16:
        raise DtypeError(f"quantize takes bfloat16 rows, got {x_TH.dtype}")
    if x_TH.dim() != 2:
        raise ShapeError(f"quantize takes [T, H], got {tuple(x_TH.shape)}")
    if scale_mode not in _SCALES:
        raise ConfigError(f"scale_mode is one of {SCALE_MODES}, got {scale_mode!r}")
    x_TBN = _blocks(x_TH.to(torch.float32))

    finite_TB = torch.isfinite(x_TBN).all(dim=-1)
    x_TBN = torch.where(finite_TB.unsqueeze(-1), x_TBN, 0.0)
    amax_TB = x_TBN.abs().amax(dim=-1)
    scales_TB = _SCALES[scale_mode](amax_TB)
    scales_TB = torch.where(amax_TB > 0, scales_TB, 1.0)

    codes_TBN = encode_e4m3(x_TBN / scales_TB.unsqueeze(-1))
    codes_TBN = codes_TBN.masked_fill(~finite_TB.unsqueeze(-1), E4M3_NAN_CODE)
    return codes_TBN.flatten(1)[:, : x_TH.shape[1]].contiguous(), scales_TB


def dequantize(codes_TH: Tensor, scales_TB: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows back from codes and scales: float(code) * scale in fp32, rounded to nearest even to ``dtype``.

    Args:
        codes_TH: uint8 [T, H].
        scales_TB: float32 [T, ceil(H / 128)].
        dtype: torch.bfloat16 or torch.float32.

    Returns:
        [T, H] of ``dtype``. Every NaN is the canonical one of the dtype (0x7FC0, 0x7FC00000).

    Raises:
        DtypeError: a dtype is not one of those above.
        ShapeError: the shapes do not belong together.
    """
    if codes_TH.dtype != torch.uint8 or scales_TB.dtype != torch.float32 or dtype not in _CANONICAL_NAN:
        raise DtypeError(
            "dequantize takes uint8 codes and float32 scales and gives bfloat16 or float32, "
            f"got {codes_TH.dtype}, {scales_TB.dtype}, {dtype}"
        )
    if codes_TH.dim() != 2 or scales_TB.shape != (codes_TH.shape[0], -(-codes_TH.shape[1] // BLOCK)):
        raise ShapeError(
            f"codes are [T, H] and scales [T, ceil(H / {BLOCK})], "
            f"got {tuple(codes_TH.shape)} and {tuple(scales_TB.shape)}"
        )
    values_TBN = _blocks(decode_e4m3(codes_TH)) * scales_TB.unsqueeze(-1)
    return with_canonical_nans(values_TBN.flatten(1)[:, : codes_TH.shape[1]].to(dtype))


def _blocks(x_TH: Tensor) -> Tensor:
    """[T, B, 128], filled up with zeros."""
    num_rows, hidden = x_TH.shape
    num_blocks = -(-hidden // BLOCK)
    filled = torch.nn.functional.pad(x_TH, (0, num_blocks * BLOCK - hidden))
    return filled.reshape(num_rows, num_blocks, BLOCK)


def encode_e4m3(y: Tensor) -> Tensor:
    """The nearest e4m3 codes (uint8) of finite float32 values: ties to even, saturating at +-448."""
    magnitude = y.abs()
    # Below 2^-6 the format is subnormal: its steps stop shrinking, as if the exponent were -6.
    exponent = ((magnitude.view(torch.int32) >> _FP32_MANTISSA_BITS) - _FP32_BIAS).clamp(min=-6)
    # Dividing by a power of two is exact here, and torch.round is half-to-even: one rounding in all.
    num_steps = torch.round(magnitude / _power_of_two(exponent - 3)).to(torch.int32)
    # Codes of one sign ascend with the value, eight to an exponent. A normal number has 8 to 15 steps; where
    # rounding gives 16, or a subnormal reaches 8, the same sum carries into the next exponent.
    code = ((exponent + 7) << 3) + num_steps - 8
    code = code.clamp(max=E4M3_MAX_CODE)
    return (code | (torch.signbit(y).to(torch.int32) << 7)).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """The float32 values of e4m3 codes (uint8, any shape). 0x7F and 0xFF give NaN."""
    code = torch.arange(256, dtype=torch.int32, device=codes.device)
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    num_steps = torch.where(exponent > 0, mantissa + 8, mantissa)
    values = num_steps.to(torch.float32) * _power_of_two(exponent.clamp(min=1) - 7 - 3)
    values = torch.where((code & 0x7F) == E4M3_NAN_CODE, torch.nan, values)
    values = torch.where(code >= 0x80, -values, values)
    return values[codes.to(torch.int64)]


def with_canonical_nans(x: Tensor) -> Tensor:
    """``x`` (bfloat16 or float32) with each NaN replaced by the canonical pattern: 0x7FC0 or 0x7FC00000."""
    integer, pattern = _CANONICAL_NAN[x.dtype]
    # On the bits, because nothing promises that a NaN keeps its payload in floating-point operations.
    return x.view(integer).masked_fill(torch.isnan(x), pattern).view(x.dtype)


def wire_row_bytes(hidden: int, wire: str) -> int:
    """Bytes of one row between domains, for ``wire`` "fp8", "bf16" or "fp32".

    An FP8 row is H codes and ceil(H / 128) fp32 scales; the scales are filled up to a multiple of 16 bytes,
    so that rows stay aligned for bulk copies.

    Raises:
        ConfigError: the wire format is unknown.
    """
    if wire == "bf16":
        return 2 * hidden
    if wire == "fp32":
        return 4 * hidden
    if wire != "fp8":
        raise ConfigError(f"wire is fp8, bf16 or fp32, got {wire!r}")
    scale_bytes = 4 * -(-hidden // BLOCK)
    return hidden + -(-scale_bytes // 16) * 16


def _pow2_scale(amax: Tensor) -> Tensor:
    """2^ceil(log2(amax/448)) for finite amax > 0, clamped; on the bits, as a logarithm would be rounded."""
    bits = amax.view(torch.int32)
    exponent = (bits >> _FP32_MANTISSA_BITS) - _FP32_BIAS
    mantissa = bits & ((1 << _FP32_MANTISSA_BITS) - 1)
    # 448 = 1.75 * 2^8, and 0x600000 is the mantissa field of 1.75. A subnormal amax is clamped either way.
    exponent = exponent - 8 + (mantissa > 0x600000).to(torch.int32)
    return _power_of_two(exponent.clamp(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT))


def _fp32_scale(amax: Tensor) -> Tensor:
    # A tensor as divisor: with a Python number, torch multiplies by its rounded reciprocal on some devices.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    return scale.clamp(min=2.0**MIN_SCALE_EXPONENT)


_SCALES = {"pow2": _pow2_scale, "fp32": _fp32_scale}
SCALE_MODES = tuple(_SCALES)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exactly, for int32 exponents from -126 to 127."""
    return ((exponent + _FP32_BIAS) << _FP32_MANTISSA_BITS).view(torch.float32)
