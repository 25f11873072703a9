"""What a dispatch returns.

R = received rows (padding included; with a capacity: that), H = hidden, L = experts of a rank, W = columns of
a compact row's weights: as many experts of a rank as a token can have, min(K or E, L).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.common.uncopied import Frozen
from uccl_ep_train.errors import DtypeError

LayoutName = Literal["expert_major", "compact"]


class NativePlan(Protocol):
    """What `DispatchHandle` needs of a native plan, on the host or on a GPU."""

    @property
    def plan_id(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def expert_alignment(self) -> int: ...
    @property
    def tokens_per_expert(self) -> list[int]: ...
    @property
    def tokens_per_expert_exact(self) -> list[int]: ...
    @property
    def routing_width(self) -> int: ...
    @property
    def routing_kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class NativeOp(Protocol):
    """What a pending operation needs of a native operation."""

    @property
    def done(self) -> bool: ...


class RowLayout(NamedTuple):
    """The layout of a dispatch's rows.

    name             "expert_major": a row per pair of token and expert, each expert's rows together and
                     padded. "compact": a row per token
    alignment        rows, to which an expert's rows are padded; 1 if compact
    capacity         rows of the outputs; None: as many as are received
    pad_to_capacity  unused rows become padding; else they are not written
    max_tokens       of any rank; None: not said
    width            W if compact, else 0
    """

    name: LayoutName = "expert_major"
    alignment: int = 1
    capacity: int | None = None
    pad_to_capacity: bool = False
    max_tokens: int | None = None
    width: int = 0

    @property
    def compact(self) -> bool:
        return self.name == "compact"

    def weights_shape(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows, self.width) if self.compact else (num_rows,)


@dataclass(frozen=True, kw_only=True, eq=False)
@opaque_methods
class DispatchHandle(Frozen):
    """The plan of one dispatch: needed by `combine`, and by later dispatches with the same routing.

    A handle belongs to its buffer. It holds about 13 bytes per pair sent or received in a group of 64 ranks,
    28 of 2,048 (`nbytes`). On a GPU its memory is allocated before the counts are known, for up to 5/4 of
    what recent dispatches had. Frozen; any number may be in use at a time; freed with the last reference.

    num_tokens               T, rows of x that were dispatched from this rank
    num_rows                 R, rows received, padding included; with a capacity: the capacity
    tokens_per_expert        pairs of each local expert, padded to `expert_alignment`: its rows if they are
                             expert-major. None with a capacity: the host does not know them
    tokens_per_expert_exact  the same without padding
    layout                   "expert_major" | "compact"
    capacity                 rows, None: none was given
    pad_to_capacity          unused rows up to it are padding
    max_tokens               of any rank, None: was not said
    plan_id                  equal on all ranks
    expert_alignment         rows
    nbytes                   memory held by the plan
    """

    plan: NativePlan = field(repr=False)
    owner: object = field(repr=False)
    row_layout: RowLayout
    storage: Tensor | None = field(default=None, repr=False)

    # Read on demand: a handle exists before the counts are known, and before the kernels are launched.

    @cached_property
    def num_tokens(self) -> int:
        return self.plan.num_tokens

    @cached_property
    def plan_id(self) -> int:
        return self.plan.plan_id

    @cached_property
    def routing_kind(self) -> str:
        return self.plan.routing_kind

    @cached_property
    def routing_width(self) -> int:
        return self.plan.routing_width

    @property
    def expert_alignment(self) -> int:
        return self.row_layout.alignment

    @property
    def layout(self) -> LayoutName:
        return self.row_layout.name

    @property
    def capacity(self) -> int | None:
        return self.row_layout.capacity

    @property
    def pad_to_capacity(self) -> bool:
        return self.row_layout.pad_to_capacity

    @property
    def max_tokens(self) -> int | None:
        return self.row_layout.max_tokens

    @cached_property
    def num_rows(self) -> int:
        return int(self.plan.num_rows) if self.capacity is None else self.capacity

    @cached_property
    def tokens_per_expert(self) -> tuple[int, ...] | None:
        return tuple(self.plan.tokens_per_expert) if self.capacity is None else None

    @cached_property
    def tokens_per_expert_exact(self) -> tuple[int, ...] | None:
        return tuple(self.plan.tokens_per_expert_exact) if self.capacity is None else None

    @cached_property
    def counts(self) -> Tensor:
        """tokens_per_expert as [L] int64 on the CPU; for copies only."""
        assert self.tokens_per_expert is not None
        # A quarter of the time of torch.tensor().
        return torch.frombuffer(array("q", self.tokens_per_expert), dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return int(self.plan.nbytes)

    def keep(self, storage: Tensor | None) -> None:
        """The plan's memory on a GPU, before anybody else has the handle."""
        object.__setattr__(self, "storage", storage)


class Fp8Rows(NamedTuple):
    """Rows as a block-scaled GEMM takes them: value = code * scale of its block of 128 columns.

    codes   [R, H] float8_e4m3fn
    scales  [R, ceil(H / 128)] float32; or [R, ceil(H / 512)] int32: exponents, see `exponents.py`. Of rows
            that the caller quantised also [R, ceil(H / 128)] int32, H above 128: an exponent for each 32
            columns, four in a word (MXFP8). With H up to 128 a word of several exponents is an
            `InputError`. Words of padding are not exponents; its codes are 0
    """

    codes: Tensor
    scales: Tensor


class DispatchResult(NamedTuple):
    """What `Buffer.dispatch` returns.

    rows               [R, H], dtype of x; expert-major, each expert's segment padded with zero rows. Compact:
                       one row per token, ordered by source and token. With output_dtype = "fp8": `Fp8Rows`
                       (in padding rows codes are 0 and scales 1.0); `fp8_rows` for type checkers
    tokens_per_expert  [L] int64: pairs of each local expert, padding included; on the CPU, with a capacity on
                       the device of rows. Not cut by the capacity
    row_weights        [R] float32, zero for padding; compact: [R, W], of the experts in row_experts, zero
                       beside them; None if the dispatch was given no weights
    handle             for `combine` and for later dispatches with the same routing
    row_experts        compact: [R, W] int64, local indices of a row's experts, ascending, then -1; else None
    overflow           bool [] on the device of rows: more rows were received than the capacity, and the rest
                       was dropped; None without a capacity
    metadata           [R, M] int32, zero for padding: that of each row's token; None if none travelled

    With a capacity, unused rows, row_weights, row_experts and metadata are not written: their contents are
    undefined. After a dispatch with `pad_to_capacity` they are padding: zero rows (codes 0, scales
    1.0), weights 0, experts -1, metadata 0.
    """

    rows: Tensor
    tokens_per_expert: Tensor
    row_weights: Tensor | None
    handle: DispatchHandle
    row_experts: Tensor | None = None
    overflow: Tensor | None = None
    metadata: Tensor | None = None

    @property
    def fp8_rows(self) -> Fp8Rows:
        """`rows` of a dispatch with output_dtype = "fp8". Raises `DtypeError` for those of another."""
        rows: object = self.rows
        if not isinstance(rows, Fp8Rows):
            raise DtypeError(f"rows are {self.rows.dtype}: allowed are those of output_dtype = 'fp8'")
        return rows
