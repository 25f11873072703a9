"""The oracle of a low-latency dispatch and combine: those of a whole group, in plain torch.

Shapes: T tokens of a rank (differs per rank, may be 0), M the most tokens of any rank, R ranks, H hidden, K
experts a token can name, E experts, L experts of a rank. Lists are indexed by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.errors import ConfigError, ShapeError
from uccl_ep_train.oracle import fp8
from uccl_ep_train.oracle.plan import members_of_domains

SCALE_MODE = {"fp8": "pow2", "fp8_fp32": "fp32"}
"""By the wire of a dispatch."""


class Slots(NamedTuple):
    """What one rank gets, as `SlotRows` and `SlotHandle` have it; zeros beyond the counts.

    rows           [L, R * M, H] bfloat16, or `Fp8Rows`
    counts         [L] int32
    ranges         [L, R] int64
    source_tokens  [L, R * M] int32
    """

    rows: Tensor | Fp8Rows
    counts: Tensor
    ranges: Tensor
    source_tokens: Tensor


class Stretch(NamedTuple):
    """The rows that one source sends to one expert.

    expert  of the group; local: its index at its rank
    source  a rank
    begin   the first row of the expert's block
    tokens  [n] int64, ascending: at the source
    """

    expert: int
    local: int
    source: int
    begin: int
    tokens: Tensor

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + len(self.tokens))


def stretches(topk_idx: Sequence[Tensor], owner: int, num_experts: int) -> list[Stretch]:
    """All that come to the rank `owner`: experts ascending, then sources ascending."""
    num_local = num_experts // len(topk_idx)
    found = []
    for local in range(num_local):
        expert, begin = owner * num_local + local, 0
        for source, topk_idx_TK in enumerate(topk_idx):
            tokens = (topk_idx_TK == expert).any(dim=1).nonzero().flatten()
            found.append(Stretch(expert, local, source, begin, tokens))
            begin += len(tokens)
    return found


def dispatch_slots(
    x: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    num_experts: int,
    max_tokens: int,
    wire: str = "fp8",
    ue8m0: bool = False,
) -> list[Slots]:
    """What every rank gets of the tokens x [T, H] bfloat16, by topk_idx [T, K] int64 (-1: no expert).

    wire   "bf16": rows as they are; "fp8": scales are powers of two; "fp8_fp32": unrounded scales
    ue8m0  scales are exponents, four in a word; with "fp8" only

    Raises `ConfigError` for another wire, `ShapeError` where a rank has more than M tokens.
    """
    if wire not in ("bf16", *SCALE_MODE) or (ue8m0 and wire != "fp8"):
        raise ConfigError(
            f"wire = {wire!r}, ue8m0 = {ue8m0}; allowed is bf16, fp8 or fp8_fp32, and ue8m0 with fp8 only"
        )
    if any(len(x_TH) > max_tokens for x_TH in x):
        raise ShapeError(f"T = {[len(x_TH) for x_TH in x]}; allowed is at most max_tokens = {max_tokens}")
    sent = [x] if wire == "bf16" else list(zip(*(fp8.quantize(t, SCALE_MODE[wire]) for t in x), strict=True))
    results = []
    for owner in range(len(x)):
        shape = (num_experts // len(x), len(x) * max_tokens)
        ranges = torch.zeros(shape[0], len(x), dtype=torch.int64)
        source_tokens = torch.zeros(shape, dtype=torch.int32)
        parts = [of_rank[0].new_zeros(*shape, of_rank[0].shape[1]) for of_rank in sent]
        for stretch in stretches(topk_idx, owner, num_experts):
            ranges[stretch.local, stretch.source] = stretch.begin << 32 | len(stretch.tokens)
            source_tokens[stretch.local, stretch.rows] = stretch.tokens.to(torch.int32)
            for part, of_rank in zip(parts, sent, strict=True):
                part[stretch.local, stretch.rows] = of_rank[stretch.source][stretch.tokens]
        counts = (ranges & 0xFFFFFFFF).sum(dim=1).to(torch.int32)
        results.append(Slots(_rows(parts, ue8m0), counts, ranges, source_tokens))
    return results


def _rows(parts: Sequence[Tensor], ue8m0: bool) -> Tensor | Fp8Rows:
    if len(parts) == 1:
        return parts[0]
    codes, scales = parts
    return Fp8Rows(codes.view(torch.float8_e4m3fn), words_of(scales) if ue8m0 else scales)


def words_of(scales: Tensor) -> Tensor:
    """Scales [..., B] float32, powers of two, as exponents: [..., B / 4, rounded up] int32.

    Byte i of word w, the lowest byte first, has the exponent of block 4 w + i. Bytes without a block are 0.
    """
    blocks = scales.shape[-1]
    words = torch.zeros(*scales.shape[:-1], -(-blocks // 4), dtype=torch.int64)
    for block in range(blocks):
        exponent = scales[..., block].view(torch.int32).to(torch.int64) >> 23
        words[..., block // 4] += exponent << (8 * (block % 4))
    return words.to(torch.int32)


def combine_slots(
    rows: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    domain_of: Sequence[int],
    wire: str = "bf16",
) -> list[Tensor]:
    """The weighted sums [T, H] bfloat16 of every rank's tokens.

    rows       [L, R * M, H] bfloat16 of each rank, where the dispatch put them
    topk_idx   [T, K] int64, as the dispatch had it; topk_weights [T, K] float32
    domain_of  the domain of each rank; any numbers
    wire       "bf16" or "fp32": what a rank's sum is rounded to, and what another domain returns

    All sums are fp32 and start at +0.0. A rank adds weight * row, rounded to fp32, over its experts of the
    token, ascending, and rounds the sum to `wire`. A source adds in the order of the domains. Of its own
    domain it adds each rank's sum, ranks ascending. Of another domain it adds one number, the sum over that
    domain's ranks, ascending, rounded to `wire`. The result is rounded to bfloat16; a NaN becomes 0x7FC0.
    Tokens without experts get zeros. Raises `ConfigError` for another wire.
    """
    if wire not in ("bf16", "fp32"):
        raise ConfigError(f"wire = {wire!r}; allowed is bf16 | fp32")
    num_experts = len(rows) * rows[0].shape[0]
    of_owners = []
    for owner, rows_LSH in enumerate(rows):
        shapes = [(len(topk_idx_TK), rows_LSH.shape[2]) for topk_idx_TK in topk_idx]
        sums = [torch.zeros(shape, dtype=torch.float32) for shape in shapes]
        for stretch in stretches(topk_idx, owner, num_experts):
            named_TK = topk_idx[stretch.source] == stretch.expert
            weights = topk_weights[stretch.source][named_TK]  # a token names an expert once
            product = weights[:, None] * rows_LSH[stretch.local, stretch.rows].to(torch.float32)
            sums[stretch.source][stretch.tokens] += product
        of_owners.append([rounded(sum_TH, wire) for sum_TH in sums])
    return [
        merge(source, [sums[source] for sums in of_owners], domain_of, wire) for source in range(len(rows))
    ]


def rounded(sums: Tensor, wire: str) -> Tensor:
    """float32 sums, rounded to "bf16" | "fp32"."""
    return sums.to(torch.bfloat16).to(torch.float32) if wire == "bf16" else sums


def merge(source: int, sums: Sequence[Tensor], domain_of: Sequence[int], wire: str) -> Tensor:
    """The tokens [T, H] bfloat16 of one source, from the sums [T, H] float32 of every rank."""
    total_TH = torch.zeros_like(sums[source])
    for ranks in members_of_domains(domain_of):
        if source in ranks:
            for rank in ranks:
                total_TH += sums[rank]
        else:
            relayed_TH = torch.zeros_like(total_TH)
            for rank in ranks:
                relayed_TH += sums[rank]
            total_TH += rounded(relayed_TH, wire)
    return fp8.with_canonical_nans(total_TH.to(torch.bfloat16))
