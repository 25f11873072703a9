"""Checks the arguments of dispatch and combine on the host, before anything is launched.

Shapes: T tokens, H hidden, K experts per token, E experts, R received rows. What a tensor *contains* (experts
out of range, one expert twice in a token) is checked by the native core while it reads the routing: on the
CPU before launch, on a GPU by the kernels that read it.

An argument is never copied or converted behind the caller's back: a wrong dtype or a strided view is an error
that says what to call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uccl_ep_train.common import exponents
from uccl_ep_train.common.handle import DispatchHandle, Fp8Rows, RowLayout
from uccl_ep_train.common.shown import shown
from uccl_ep_train.core.tensors import check_tensor, dtype_name
from uccl_ep_train.errors import DtypeError, InputError, RoutingError, ShapeError
from uccl_ep_train.settings.checks import FP8_BLOCK, HIDDEN_UNIT, MAX_TOPK, whole
from uccl_ep_train.settings.config import EpConfig
from uccl_ep_train.settings.sections import ScaleMode

MAX_TOKENS = 1 << 30
MAX_METADATA = 4096
MAX_ALIGNMENT = 1 << 20
ROW_ALIGNMENT = 16  # bytes
MAX_CAPACITY = (1 << 31) - 1
MAX_BIASES = 2


class Routing(NamedTuple):
    """A checked routing.

    kind    topk | map: `indices` is int64 [T, K] | bool [T, E]; plan: the handle's, `indices` is None
    values  float32, [T, K] or [T, E] by the kind (of the plan, for "plan"); None: no weights travel
    """

    kind: str
    indices: Tensor | None
    values: Tensor | None

    @property
    def width(self) -> int:
        """K or E."""
        return 0 if self.indices is None else self.indices.shape[1]


PLANNED = Routing("plan", None, None)
"""The handle's, without weights."""


def check_rows(name: str, rows: Tensor, config: EpConfig, device: torch.device) -> None:
    """`rows` is [n, H], BF16 or FP32, contiguous, on `device`; H a multiple of 32 up to `config.hidden`."""
    check_tensor(name, rows, 2, device)
    if rows.dtype not in (torch.bfloat16, torch.float32):
        raise DtypeError(f"{name} is {dtype_name(rows)}; allowed is bfloat16 or float32")
    if rows.dtype == torch.float32 and config.memory.max_dtype == "bf16":
        raise DtypeError(
            f"{name} is float32 and the buffer was created with max_dtype = 'bf16': allowed is bfloat16; for "
            "float32 rows create it with max_dtype = 'fp32' (UCCL_EP_MAX_DTYPE, --uccl-ep-max-dtype)"
        )
    _check_row_size(name, rows, config)


def check_codes(x: Fp8Rows, config: EpConfig, device: torch.device) -> tuple[Tensor, Tensor, str]:
    """Codes [T, H] and scales [T, ceil(H / 128)] float32 of rows that the caller quantised, and how they
    travel: "fp8" | "mxfp8".
    """
    codes, scales = x
    check_tensor("x.codes", codes, 2, device)
    if codes.dtype != torch.float8_e4m3fn:
        raise DtypeError(f"x.codes is {dtype_name(codes)}; allowed is float8_e4m3fn")
    _check_row_size("x.codes", codes, config)
    blocks, wire = -(-codes.shape[1] // FP8_BLOCK), "fp8"
    if isinstance(scales, Tensor) and scales.dtype == torch.int32 and scales.dim() == 2:
        words, mx_words = [codes.shape[0], exponents.num_words(blocks)], [codes.shape[0], blocks]
        if list(scales.shape) == words:
            if words == mx_words:
                _check_single(scales, codes)
            scales = exponents.unpack_exponents(scales, blocks)
        elif list(scales.shape) == mx_words:
            wire, scales = "mxfp8", exponents.dense(scales).view(torch.float32)
        else:
            raise ShapeError(
                f"x.scales is {list(scales.shape)} int32; allowed is {words}, four blocks of 128 codes in "
                f"each, or {mx_words}, four of 32"
            )
    check_tensor("x.scales", scales, 2, device)
    if scales.dtype != torch.float32:
        raise DtypeError(f"x.scales is {dtype_name(scales)}; allowed is float32, or int32 exponents")
    shape = [codes.shape[0], blocks]
    if list(scales.shape) != shape:
        raise ShapeError(f"x.scales is {list(scales.shape)}; allowed is {shape}, one of {FP8_BLOCK} codes")
    return codes, scales, wire


def _check_single(words: Tensor, codes: Tensor) -> None:
    """Both forms of exponents of rows of one block of 128 codes have this shape, and only one travels.
    A graph that is being captured cannot look.
    """
    if words.is_meta or (words.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    wrong = ((words & ~0xFF) != 0).flatten().nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"x.scales[{row}, 0] = {int(words[row, 0]) & 0xFFFFFFFF:#010x} has more than one exponent and "
            f"x.codes has {codes.shape[1]} columns; allowed is one, 0 .. 0xff, for up to 128 columns: "
            "MXFP8, an exponent for each 32, travels with more columns"
        )


def check_metadata(metadata: Tensor, x: Tensor) -> None:
    """`metadata` is [T, M] int32, contiguous, beside x. The native core checks that rows have room for it."""
    check_tensor("metadata", metadata, 2, x.device)
    if metadata.dtype != torch.int32:
        raise DtypeError(f"metadata is {dtype_name(metadata)}; allowed is int32: pass a view as torch.int32")
    if metadata.shape[0] != x.shape[0] or not 0 < metadata.shape[1] <= MAX_METADATA:
        raise ShapeError(
            f"metadata is {list(metadata.shape)}; allowed is [{x.shape[0]}, M] with M from 1 to "
            f"{MAX_METADATA}"
        )


def _check_row_size(name: str, rows: Tensor, config: EpConfig) -> None:
    num_rows, hidden = rows.shape
    if hidden % HIDDEN_UNIT or not 0 < hidden <= config.hidden:
        raise ShapeError(
            f"{name} has {hidden} columns; allowed is a multiple of {HIDDEN_UNIT} up to the buffer's hidden "
            f"= {config.hidden}"
        )
    if num_rows > MAX_TOKENS:
        raise ShapeError(f"{name} has {num_rows} rows; allowed is at most {MAX_TOKENS}")
    if rows.device.type == "cuda" and not is_aligned(rows):
        raise InputError(
            f"{name} begins at address {rows.data_ptr():#x}; allowed on a GPU is a multiple of "
            f"{ROW_ALIGNMENT}: pass {name}.clone()"
        )


def is_aligned(rows: Tensor) -> bool:
    """Whether kernels can read the rows 16 bytes at a time. Views that begin inside a row may not be."""
    return rows.data_ptr() % ROW_ALIGNMENT == 0


def split_wire(dtype: str, scale: ScaleMode) -> tuple[str, ScaleMode]:
    """A call's `dispatch_dtype` as a wire dtype and its scales, "pow2" | "fp32"; `scale`: of "fp8"."""
    if dtype == "fp8_pow2":
        return "fp8", "pow2"
    return ("fp8", "fp32") if dtype == "fp8_fp32" else (dtype, scale)


def check_wire(name: str, rows: Tensor, what: str, dtype: str) -> None:
    """`dtype` is a wire dtype ("fp8" | "bf16") that `rows` can travel in; `what` names the option."""
    if dtype not in ("fp8", "bf16"):
        scaled = " | 'fp8_pow2' | 'fp8_fp32'" if what == "dispatch_dtype" else ""
        raise InputError(f"{what} = {shown(dtype)}; allowed is 'fp8' | 'bf16'{scaled}")
    if dtype == "fp8" and rows.dtype != torch.bfloat16:
        raise DtypeError(
            f"{name} is {dtype_name(rows)} and {what} = 'fp8' quantises BF16 rows only; convert it with "
            f".bfloat16() or use {what} = 'bf16', which sends rows unquantised"
        )


def check_output(output_dtype: str | None, wire: str) -> bool:
    """Whether rows go out as codes and scales."""
    if output_dtype is None:
        return False
    if output_dtype != "fp8":
        raise InputError(f"output_dtype = {shown(output_dtype)}; allowed is None (the dtype of x) | 'fp8'")
    if wire not in ("fp8", "mxfp8"):
        raise InputError(f"output_dtype = 'fp8' with dispatch_dtype = {shown(wire)}; allowed is 'fp8'")
    return True


def check_layout(asked: RowLayout, handle: DispatchHandle | None) -> RowLayout:
    """How the rows of a dispatch will lie: with a handle as there, and asked for so or by default."""
    name = asked.name
    if name not in ("expert_major", "compact"):
        raise InputError(f"layout = {shown(name)}; allowed is 'expert_major' | 'compact'")
    alignment = check_alignment(asked.alignment, handle)
    capacity = _check_number("capacity", asked.capacity, 0, MAX_CAPACITY)
    most = _check_number("max_tokens", asked.max_tokens, 1, MAX_TOKENS)
    if not isinstance(asked.pad_to_capacity, bool):
        raise InputError(f"pad_to_capacity = {shown(asked.pad_to_capacity)}; allowed is True | False")
    if asked.pad_to_capacity and (asked if handle is None else handle).capacity is None:
        raise InputError("pad_to_capacity = True without a capacity; pass capacity, or False")
    _check_max_tokens(asked, handle)
    if handle is None:
        if name == "compact" and alignment != 1:
            raise InputError(f"expert_alignment = {alignment} with layout = 'compact'; allowed is 1")
        if alignment is asked.alignment and capacity is asked.capacity and most is asked.max_tokens:
            return asked  # as nearly always
        return asked._replace(alignment=alignment, capacity=capacity, max_tokens=most)
    if name not in ("expert_major", handle.layout):
        raise InputError(f"layout = {shown(name)} but the handle has {handle.layout!r}")
    if asked.capacity not in (None, handle.capacity):
        raise InputError(f"capacity = {asked.capacity} but the handle has {handle.capacity}")
    if asked.pad_to_capacity and not handle.pad_to_capacity:
        raise InputError("pad_to_capacity = True but the handle has False")
    return handle.row_layout


def _check_number(name: str, value: int | None, least: int, most: int) -> int | None:
    if value is None:
        return None
    try:
        number = whole(value)
    except TypeError:
        raise InputError(f"{name} = {shown(value)}; allowed is an integer or None") from None
    if not least <= number <= most:
        raise InputError(f"{name} = {number}; allowed is {least} .. {most}")
    return number


def _check_max_tokens(asked: RowLayout, handle: DispatchHandle | None) -> None:
    most = asked.max_tokens
    if most is None:
        return
    if (asked if handle is None else handle).capacity is None:
        raise InputError(f"max_tokens = {most} without a capacity; pass capacity, or None")
    if handle is not None and most != handle.max_tokens:
        raise InputError(f"max_tokens = {most} but the handle has {handle.max_tokens}")


def check_alignment(expert_alignment: int, handle: DispatchHandle | None) -> int:
    try:
        expert_alignment = whole(expert_alignment)
    except TypeError:
        raise InputError(f"expert_alignment = {shown(expert_alignment)}; allowed is an integer") from None
    if not 1 <= expert_alignment <= MAX_ALIGNMENT:
        raise InputError(f"expert_alignment = {expert_alignment}; allowed is 1 .. {MAX_ALIGNMENT} rows")
    if handle is None or expert_alignment == handle.expert_alignment:
        return expert_alignment
    if expert_alignment == 1:
        return handle.expert_alignment  # Not given: the plan's.
    raise InputError(f"expert_alignment = {expert_alignment} but the handle has {handle.expert_alignment}")


def check_handle(handle: DispatchHandle, owner: object) -> None:
    """`handle` came from a dispatch of this buffer."""
    _check_handle_type(handle)
    if handle.owner is not owner:
        raise InputError(
            "the handle comes from another buffer; allowed is a handle of this buffer's dispatch"
        )


def _check_handle_type(handle: DispatchHandle) -> None:
    if not isinstance(handle, DispatchHandle):
        raise DtypeError(f"handle is {type(handle).__name__}; allowed is the handle of a DispatchResult")


def check_combine_rows(rows: Tensor, handle: DispatchHandle, config: EpConfig, device: torch.device) -> None:
    """`rows` is [R, H] as the handle's dispatch gave it."""
    check_rows("rows", rows, config, device)
    if rows.shape[0] != handle.num_rows:
        raise ShapeError(f"rows has {rows.shape[0]} rows; the handle's dispatch gave {handle.num_rows}")


def check_row_weights(weights: Tensor, handle: DispatchHandle, config: EpConfig, device: torch.device) -> int:
    """`weights` is [R, W] float32, contiguous. Returns W."""
    _check_handle_type(handle)
    check_tensor("weights", weights, 2, device)
    if weights.dtype != torch.float32:
        raise DtypeError(f"weights is {dtype_name(weights)}; allowed is float32")
    rows, columns = weights.shape
    if rows != handle.num_rows or not 0 < columns <= config.hidden:
        allowed = f"[{handle.num_rows}, W] with W from 1 to {config.hidden}"
        raise ShapeError(f"weights is {list(weights.shape)}; allowed is {allowed}")
    return columns


def check_bias(
    bias: Tensor | Sequence[Tensor], rows: Tensor, handle: DispatchHandle, config: EpConfig
) -> tuple[Tensor, ...]:
    """`bias` is [T, H] like the checked `rows`, or up to two of them. Returns those."""
    if isinstance(bias, tuple) and not bias:
        return ()
    if not isinstance(bias, (Tensor, list, tuple)):
        raise DtypeError(f"bias is {type(bias).__name__}; allowed is a torch.Tensor, or a tuple of them")
    biases = (bias,) if isinstance(bias, Tensor) else tuple(bias)
    if len(biases) > MAX_BIASES:
        raise InputError(f"bias has {len(biases)} tensors; allowed are at most {MAX_BIASES}")
    shape = [handle.num_tokens, rows.shape[1]]
    for addend in biases:
        check_rows("bias", addend, config, rows.device)
        if addend.dtype != rows.dtype:
            raise DtypeError(f"bias is {dtype_name(addend)}; allowed is {dtype_name(rows)}, as rows")
        if list(addend.shape) != shape:
            raise ShapeError(f"bias is {list(addend.shape)}; allowed is {shape}")
    return biases


def check_routing(
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing_map: Tensor | None,
    probs: Tensor | None,
    handle: DispatchHandle | None,
    num_experts: int,
) -> Routing:
    """One of: topk_idx [T, K] int64 with topk_weights [T, K], or routing_map [T, E] bool with probs [T, E].

    All on the device of x. Weights are float32 and optional. With a handle the routing may be left out.
    """
    topk = topk_idx is not None or topk_weights is not None
    mapped = routing_map is not None or probs is not None
    if topk and mapped:
        raise InputError(
            "both forms of routing were given; allowed is topk_idx, topk_weights or routing_map, probs"
        )
    if not topk and not mapped and handle is None:
        raise InputError("no routing was given; pass topk_idx, routing_map or a handle")
    indices = routing_map if mapped else topk_idx
    values = probs if mapped else topk_weights
    if indices is None:
        return _planned(x, "map" if mapped else "topk", values, handle)
    if mapped:
        _check_map(indices, x, num_experts)
    else:
        _check_topk(indices, x)
    if values is not None:
        _check_values("probs" if mapped else "topk_weights", values, tuple(indices.shape), x.device)
    return Routing("map" if mapped else "topk", indices, values)


def _planned(x: Tensor, kind: str, values: Tensor | None, handle: DispatchHandle | None) -> Routing:
    name = "probs" if kind == "map" else "topk_weights"
    if handle is None:
        raise InputError(f"{name} was given without {'routing_map' if kind == 'map' else 'topk_idx'}")
    if x.shape[0] != handle.num_tokens:
        raise ShapeError(f"x has {x.shape[0]} rows; the handle's plan is for {handle.num_tokens}")
    if values is not None:
        if handle.routing_kind != kind:
            raise InputError(
                f"{name} was given, but the handle's plan was made from the form {handle.routing_kind!r}"
            )
        _check_values(name, values, (x.shape[0], handle.routing_width), x.device)
    return Routing("plan", None, values)


def _check_topk(topk_idx: Tensor, x: Tensor) -> None:
    check_tensor("topk_idx", topk_idx, 2, x.device)
    if topk_idx.dtype != torch.int64:
        raise DtypeError(f"topk_idx is {dtype_name(topk_idx)}; allowed is int64: convert it with .long()")
    if topk_idx.shape[0] != x.shape[0]:
        raise ShapeError(f"topk_idx has {topk_idx.shape[0]} rows and x has {x.shape[0]}")
    if not 1 <= topk_idx.shape[1] <= MAX_TOPK:
        raise ShapeError(
            f"topk_idx has {topk_idx.shape[1]} columns; allowed is 1 .. {MAX_TOPK}: use routing_map for more"
        )


def _check_map(routing_map: Tensor, x: Tensor, num_experts: int) -> None:
    check_tensor("routing_map", routing_map, 2, x.device)
    if routing_map.dtype != torch.bool:
        raise DtypeError(
            f"routing_map is {dtype_name(routing_map)}; allowed is bool: convert it with .bool()"
        )
    if tuple(routing_map.shape) != (x.shape[0], num_experts):
        raise ShapeError(f"routing_map is {list(routing_map.shape)}; [T, E] is {[x.shape[0], num_experts]}")


def _check_values(name: str, values: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    check_tensor(name, values, 2, device)
    if values.dtype != torch.float32:
        raise DtypeError(
            f"{name} is {dtype_name(values)}; allowed is float32, as weights and their gradients travel: use "
            ".float()"
        )
    if tuple(values.shape) != shape:
        raise ShapeError(f"{name} is {list(values.shape)}; allowed is {list(shape)}")


__all__ = [
    "PLANNED",
    "Routing",
    "RoutingError",
    "check_alignment",
    "check_codes",
    "check_combine_rows",
    "check_handle",
    "check_layout",
    "check_metadata",
    "check_output",
    "check_routing",
    "check_rows",
    "check_wire",
    "is_aligned",
    "split_wire",
]
