"""What the native layout gives a group: memory, tokens of a window, chunks, messages, rings of events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from uccl_ep_train.core import cuda
from uccl_ep_train.core.stats import MemoryPlan, memory_plan
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import ConfigError, ShapeError
from uccl_ep_train.planner.shape import Shape
from uccl_ep_train.settings.checks import MAX_WINDOW_CHUNKS
from uccl_ep_train.settings.config import EpConfig

TOKEN_BLOCK = 32  # tokens; windows consist of whole blocks: kTokenBlock in csrc/backend/gpu/layout.h
USUAL_CHUNK_BYTES = 512 << 10  # rings_for() in csrc/backend/gpu/layout.cc
LEAST_CHUNKS = 8  # of a window, there
SPANS = (1, 4, 8, 16, 32)  # token blocks whose most rows ranks know: SpanRows in csrc/backend/gpu/layout.h
_RINGS_OF_PASS = 32  # a lane each


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Sizes of one rank's buffer.

    memory                 of the rank that needs most; None: not known, and rows are not cut into windows
    dispatch_window        tokens of a window of dispatch
    first_window           of the first one with a new plan; None: as many
    combine_window         tokens of a window of combine
    chunk_rows             (dispatch, combine) rows of a chunk between domains
    slots                  chunks of a ring
    event_rings            rings of events that a rank follows
    batch_streams          streams of other ranks that a combine merges at once
    stream_batches         windows that tokens take in a combine: one for each batch of streams
    """

    memory: MemoryPlan | None
    dispatch_window: int
    combine_window: int
    first_window: int | None = None
    chunk_rows: tuple[int, int]
    slots: int
    event_rings: int
    batch_streams: int = 0
    stream_batches: int = 1

    @property
    def passes(self) -> int:
        """Round trips of the warp that polls, to see the next event of each ring."""
        return math.ceil(self.event_rings / _RINGS_OF_PASS)

    def windows(self, op: str, tokens: int, *, new: bool = False) -> list[int]:
        """Tokens of each window of an operation ("dispatch" | "combine"). new: with a new plan."""
        most = self.dispatch_window if op == "dispatch" else self.combine_window
        ends = {*range(most, tokens, most), tokens}
        if new and op == "dispatch" and self.first_window is not None:
            ends.add(min(self.first_window, tokens))
        return [end - begin for begin, end in pairwise([0, *sorted(ends)])]


def config_of(shape: Shape, budget_bytes: int = 512 << 20, window_tokens: int | None = None) -> EpConfig:
    """Of a buffer for this shape on GPUs. BF16 is the widest row."""
    return EpConfig(
        num_experts=shape.router.num_experts,
        hidden=shape.hidden,
        dispatch_dtype=shape.dtype,
        max_dtype="bf16",
        backend="cuda",
        budget_bytes=budget_bytes,
        window_tokens=window_tokens,
    )


def protocol_of(shape: Shape, budget_bytes: int = 512 << 20, window_tokens: int | None = None) -> Protocol:
    """Raises what creating the buffer raises, `MemoryBudgetError`, `ConfigError`, or else `ShapeError` where
    it holds the routing of fewer tokens.
    """
    if not cuda.built():
        raise ConfigError(
            "windows of GPUs are not known: the extension was built without CUDA kernels; allowed is one "
            "that nvcc has built, see UCCL_EP_CUDA_ARCHS"
        )
    config = config_of(shape, budget_bytes, window_tokens)
    plan = fullest_plan(config, shape.topology)
    assert plan.max_tokens is not None and plan.max_pairs is not None and plan.window_tokens is not None
    pairs = shape.tokens * shape.router.topk
    if shape.tokens > plan.max_tokens or pairs > plan.max_pairs:
        raise ShapeError(
            f"{shape.tokens} tokens with {shape.router.topk} experts each: with budget_bytes = "
            f"{budget_bytes} and window_tokens = {window_tokens} a buffer holds the routing of "
            f"{plan.max_tokens} tokens and {plan.max_pairs} experts of tokens"
        )
    widest = shape.row_bytes("bf16")
    window = plan.window_tokens
    chunk = min(max(1, USUAL_CHUNK_BYTES // widest), max(1, window // LEAST_CHUNKS))
    slots = math.ceil(window / chunk)
    chunk_bytes = chunk * widest
    streams = 1
    if max(shape.domains) > 1:
        streams += max(_relayed(shape, rank) for rank in _classes(shape.topology))
    pieces = plan["pieces"] // min(streams, 1 + plan.batch_streams) // widest
    row = shape.row_bytes(shape.dtype)
    staged = dispatch = first = plan["rows"] // 2 // row // TOKEN_BLOCK
    if len(shape.domains) > 1:
        shipped = slots * (chunk_bytes // row)
        first = min(staged, shipped // TOKEN_BLOCK)
        fits = (n * min(staged // n, shipped // _most_rows(shape, n)) for n in SPANS)
        dispatch = max(first, *fits)

    def combined(parts: int) -> int:  # tokens whose pieces fit one of so many parts of the memory
        tokens = pieces // parts // _most_pieces(shape) * TOKEN_BLOCK
        if len(shape.domains) == 1:
            return tokens
        return min(tokens, max(1, slots // parts * chunk // _most_rows(shape, 1)) * TOKEN_BLOCK)

    at_once = plan.stream_batches == 1 and shape.tokens <= combined(1)
    combine = combined(1) if at_once else combined(2)
    return Protocol(
        memory=plan,
        dispatch_window=max(1, dispatch) * TOKEN_BLOCK,
        first_window=max(1, first) * TOKEN_BLOCK,
        combine_window=max(TOKEN_BLOCK, combine // TOKEN_BLOCK * TOKEN_BLOCK),
        chunk_rows=(max(1, chunk_bytes // row), chunk),
        slots=slots,
        event_rings=event_rings(shape),
        batch_streams=plan.batch_streams,
        stream_batches=plan.stream_batches,
    )


def unlimited(shape: Shape) -> Protocol:
    """Without windows: where the native layout is not known, or does not matter."""
    chunk = USUAL_CHUNK_BYTES // shape.row_bytes("bf16")
    row = shape.row_bytes(shape.dtype)
    return Protocol(
        memory=None,
        dispatch_window=max(TOKEN_BLOCK, shape.tokens),
        combine_window=max(TOKEN_BLOCK, shape.tokens),
        chunk_rows=(USUAL_CHUNK_BYTES // row, chunk),
        slots=MAX_WINDOW_CHUNKS,
        event_rings=event_rings(shape),
    )


def event_rings(shape: Shape) -> int:
    """Of the rank that follows most: one of each member of its domain, for what has come, and another of its
    own. Network::follow in csrc/engine/gpu/network.cc."""
    return max(shape.domains) + 1 if len(shape.domains) > 1 else 0


def fullest_plan(config: EpConfig, topology: Topology) -> MemoryPlan:
    """The memory plan of the rank that needs most. Raises what `memory_plan` raises."""
    plans = (memory_plan(config, topology, rank) for rank in _classes(topology))
    return max(plans, key=lambda plan: plan.total_bytes)


def _classes(topology: Topology) -> list[int]:
    """A rank of each size of domain and place in it: others are like one of them."""
    found: dict[tuple[int, int], int] = {}
    for members in topology.members:
        for local, rank in enumerate(members):
            found.setdefault((len(members), local), rank)
    return list(found.values())


def _relayed(shape: Shape, rank: int) -> int:
    """Ranks of other domains whose rail `rank` is."""
    topology = shape.topology
    own, local = topology.domain_of[rank], topology.local_rank(rank)
    size = shape.domains[own]
    return sum(
        len(range(local, other, size)) for d, other in enumerate(shape.domains) if d != own and local < other
    )


def _most_rows(shape: Shape, blocks: int) -> int:
    """Rows that blocks of tokens have for another domain: expected, and four standard deviations."""
    most, tokens = 1, blocks * TOKEN_BLOCK
    for source, home in enumerate(shape.topology.domain_of[: len(shape.counts.to_domain_SD)]):
        share = np.delete(shape.counts.to_domain_SD[source] / shape.tokens, home).max()
        deviation = math.sqrt(tokens * share * (1 - share))
        most = max(most, min(tokens, math.ceil(tokens * share + 4 * deviation)))
    return most


def _most_pieces(shape: Shape) -> int:
    """Pieces that a block of tokens has in a domain: expected, and three standard deviations."""
    most = TOKEN_BLOCK
    hits_SR = np.clip(shape.counts.to_rank_SR / shape.tokens, 0, 1)
    for first, size in zip(shape.first_of, shape.domains, strict=False):
        hits = hits_SR[:, first : first + size].max(0)
        deviation = math.sqrt(float((hits * (1 - hits)).sum()) / TOKEN_BLOCK)
        mean = float(hits.sum()) + 3 * deviation
        most = max(most, math.ceil(TOKEN_BLOCK * min(size, shape.router.topk, mean)))
    return most
