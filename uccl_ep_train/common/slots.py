"""Rows of a low-latency dispatch: each expert of a rank has a block of as many rows as can ever come.

Shapes: T tokens of this rank, M the most tokens of any rank, R ranks, H hidden, K experts per token, L
experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.uncopied import Frozen

SlotWireName = Literal["bf16", "fp8", "fp8_fp32"]
WIRE_NAMES: tuple[str, ...] = get_args(SlotWireName)
COUNT_BITS = 32
"""Of an entry of `SlotHandle.ranges`, the lower ones; the begin is above them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotHandle(Frozen):
    """What a combine needs of its low-latency dispatch. Frozen; belongs to the object that made it.

    source_tokens  [L, R * M] int32: of each row, its token's index at the source. Undefined beyond the count
    ranges         [L, R] int64, begin << 32 | count: the rows of each source among those of the expert
    counts         [L] int32: rows of each expert
    max_tokens     M
    hidden         H
    num_tokens     T
    num_topk       K, columns of topk_idx
    routing        topk_idx and topk_weights of a dispatch that was given weights, else None
    plan           private to the maker
    owner          identifies the maker
    """

    source_tokens: Tensor
    ranges: Tensor
    counts: Tensor
    max_tokens: int
    hidden: int
    num_tokens: int
    num_topk: int
    routing: tuple[Tensor, Tensor] | None
    plan: object = field(repr=False)
    owner: object = field(repr=False)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        plan = (self.plan,) if isinstance(self.plan, Tensor) else ()
        return self.source_tokens, self.ranges, self.counts, *plan, *(self.routing or ())


class SlotRows(NamedTuple):
    """What a low-latency dispatch returns. Expert l has `rows[l, : counts[l]]`, by source, then token.

    rows    [L, R * M, H] bfloat16; or `Fp8Rows` with codes [L, R * M, H] float8_e4m3fn and scales
            [L, R * M, ceil(H / 128)] float32. The scales' last two dimensions are column-major: the stride
            of rows is 1, that of blocks R * M. UE8M0 scales are [L, R * M, ceil(H / 512)] int32,
            column-major, too: see `exponents.py`
    counts  [L] int32, on the device of rows
    handle  for the combine

    Rows, scales and tokens beyond the count are undefined and change no result.
    """

    rows: Tensor | Fp8Rows
    counts: Tensor
    handle: SlotHandle


class SlotStatistics(NamedTuple):
    """Counters of the caller, which operations add to, or None.

    total_counts  [L] int32: rows of each expert
    waited_ns     [R] int64: what this rank waited for each other one to enter
    """

    total_counts: Tensor | None = None
    waited_ns: Tensor | None = None
