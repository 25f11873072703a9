"""Low-latency dispatch and combine on CPUs, composed of a `Buffer`'s operations and of torch's.

A combine gives the bits of `oracle/low_latency.py`.

Shapes: T tokens of this rank, M the most tokens of any rank, R ranks, H hidden, K experts per token, L
experts of this rank, S = R * M rows of an expert's block, W = min(K, L).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer
from uccl_ep_train.common.handle import DispatchHandle, DispatchResult, Fp8Rows
from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.common.slots import COUNT_BITS, SlotHandle, SlotRows, SlotWireName, pack_exponents
from uccl_ep_train.core import routing
from uccl_ep_train.core.slot_checks import SlotChecks
from uccl_ep_train.errors import ConfigError, DtypeError, InputError
from uccl_ep_train.settings.checks import MAX_TOKENS
from uccl_ep_train.settings.sections import CallWireDtype

_WIRES: dict[str, CallWireDtype] = {"bf16": "bf16", "fp8": "fp8_pow2", "fp8_fp32": "fp8_fp32"}
_WEIGHT_COLUMNS = 128  # of rows that travel only because weights travel beside them
_BFLOAT16_NAN = 0x7FC0


@dataclass(frozen=True, eq=False)
class _Plan:
    """handle: of the compact dispatch. places [S, W] int64: where a compact row's experts have it, as l * S +
    row; L * S where there is no expert. weights [S, W] float32, if they came with the rows
    """

    handle: DispatchHandle
    places: Tensor
    weights: Tensor | None


@opaque_methods
class ComposedSlots:
    """Low-latency calls of one buffer. All ranks make them in one order, as they do those of the buffer.

    buffer      made with max_dtype = "fp32" and `hidden` of at least H, because a combine sums rows in fp32.
                Other settings are free: dispatch_dtype and fp8_scale have no effect here
    max_tokens  M, 1 .. 65536, equal on all ranks

    A dispatch is one operation of the buffer. A combine is two, or one with the dispatch's weights. Calls may
    alternate with the buffer's own. They have no gradients. A refused call counts as one operation of the
    buffer: see `errors.py`.

    Raises `DtypeError` for what is no `Buffer`, `ConfigError` for a buffer on a GPU or of max_dtype = "bf16",
    `InputError` for max_tokens.
    """

    def __init__(self, buffer: Buffer, max_tokens: int) -> None:
        if not isinstance(buffer, Buffer):
            raise DtypeError(f"buffer is {type(buffer).__name__}; allowed is a Buffer")
        if buffer.device.type != "cpu":
            raise ConfigError(f"the buffer is on {buffer.device}; allowed is one of CPUs")
        if buffer.config.memory.max_dtype != "fp32":
            raise ConfigError(
                f"the buffer has max_dtype = {buffer.config.memory.max_dtype!r}; allowed is 'fp32', in which "
                "a combine sums rows"
            )
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
            raise InputError(f"max_tokens = {max_tokens!r}; allowed is an integer")
        most = min(MAX_TOKENS, routing.MAX_CAPACITY // buffer.num_ranks)
        if not 1 <= max_tokens <= most:
            raise InputError(f"max_tokens = {max_tokens}; allowed is 1 .. {most}")
        self.buffer = buffer
        self.max_tokens = max_tokens
        self._num_rows = buffer.num_ranks * max_tokens  # S
        self._checks = SlotChecks(buffer.config, buffer.device, buffer.num_ranks, max_tokens, object())
        self._num_local = self._checks.num_local  # L
        self._rounds_sums = buffer.config.wire.combine_wire_dtype == "bf16"
        order = buffer.config.source_order
        self._order = None if order is None else torch.tensor(order, device=buffer.device)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        wire: SlotWireName = "fp8",
        ue8m0: bool = False,
    ) -> SlotRows:
        """Sends each token to its experts, and returns the rows that this rank's experts got.

        x             [T, H] bfloat16, contiguous; T at most M, and may be 0; H a multiple of 128, at most the
                      buffer's `hidden`, equal on all ranks
        topk_idx      [T, K] int64, -1: no expert; K at most 32
        topk_weights  [T, K] float32 for the combine, on all ranks or on none
        wire          equal on all ranks. "bf16": rows come as they are. "fp8": rows are codes, scales are
                      powers of two. "fp8_fp32": scales are not rounded
        ue8m0         scales are exponents, four in an int32; with "fp8" only

        Raises what `Buffer.dispatch` raises: `DtypeError`, `ShapeError`, `RoutingError`, `InputError` before
        anything is launched; `CommunicationError`; `ClosedError`.
        """
        with torch.no_grad():
            with self.buffer.preparing("dispatch"):
                self._checks.dispatch(x, topk_idx, topk_weights, wire, ue8m0)
                metadata = self._metadata(len(x))
            result = self.buffer.dispatch(
                x,
                topk_idx,
                topk_weights,
                layout="compact",
                capacity=self._num_rows,
                pad_to_capacity=True,
                dispatch_dtype=_WIRES[wire],
                output_dtype=None if wire == "bf16" else "fp8",
                metadata=metadata,
            )
            told = None if topk_weights is None else (topk_idx, topk_weights)
            return self._spread(result, x, (topk_idx.shape[1], told), ue8m0)

    def combine(
        self,
        rows: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: SlotHandle,
        out: Tensor | None = None,
    ) -> Tensor:
        """Sums, for each token of this rank, its experts' rows times their weights, in fp32.

        rows          [L, R * M, H] bfloat16, contiguous, where the dispatch put them; those beyond the counts
                      change nothing
        topk_idx      [T, K] int64, as the dispatch had it; else every rank raises `PlanMismatchError`
        topk_weights  [T, K] float32; or both are None on all ranks: those of the dispatch
        handle        of the dispatch
        out           [T, H] bfloat16, contiguous: is filled and returned. None: a new tensor is

        Returns [T, H] bfloat16: rounded at the end. Each rank's sum, and what another domain returns, is
        rounded to the buffer's combine_wire_dtype before. Zeros for tokens without experts. Order of the
        sums: experts of a rank ascending; then as `Buffer.combine` adds fp32 rows.

        Raises what `dispatch` raises.
        """
        with torch.no_grad():
            with self.buffer.preparing("dispatch"):
                out = self._checks.combine(rows, topk_idx, topk_weights, handle, out)
                plan = handle.plan
                assert isinstance(plan, _Plan)
                nothing = rows.new_zeros(handle.num_tokens, _WEIGHT_COLUMNS)
            weights = plan.weights
            if topk_idx is not None:
                weights = self.buffer.dispatch(
                    nothing, topk_idx, topk_weights, handle=plan.handle, dispatch_dtype="bf16"
                ).row_weights
            with self.buffer.preparing("combine"):
                assert weights is not None
                sums = self._weighted(rows, weights, plan.places)
            total = self.buffer.combine(sums, plan.handle, rounds_sums=self._rounds_sums)
            out.copy_(total)
            # Devices convert a NaN to different bits.
            out.view(torch.int16).masked_fill_(out.isnan(), _BFLOAT16_NAN)
            return out

    def _metadata(self, num_tokens: int) -> Tensor:
        """[T, 2] int32: this rank and the token's index."""
        device = self.buffer.device
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
        return torch.stack([torch.full_like(tokens, self.buffer.rank), tokens], dim=1)

    # ---- between compact rows and the experts' blocks

    def _spread(
        self,
        result: DispatchResult,
        x: Tensor,
        routed: tuple[int, tuple[Tensor, Tensor] | None],
        ue8m0: bool,
    ) -> SlotRows:
        """The compact rows of a dispatch, a copy for each expert. routed: K, `SlotHandle.routing`"""
        metadata, row_experts = result.metadata, result.row_experts
        assert metadata is not None and row_experts is not None
        counts_RL, places = self._places(row_experts, metadata[:, 0].to(torch.int64))
        begins_RL = counts_RL.cumsum(0) - counts_RL
        counts = counts_RL.sum(0, dtype=torch.int32)
        handle = SlotHandle(
            source_tokens=self._copied(metadata[:, 1:], places)[..., 0],
            ranges=(begins_RL << COUNT_BITS | counts_RL).T.contiguous(),
            counts=counts,
            max_tokens=self.max_tokens,
            hidden=x.shape[1],
            num_tokens=len(x),
            num_topk=routed[0],
            routing=routed[1],
            plan=_Plan(result.handle, places, None if routed[1] is None else result.row_weights),
            owner=self._checks.owner,
        )
        received: object = result.rows
        if not isinstance(received, Fp8Rows):
            return SlotRows(self._copied(result.rows, places), counts, handle)
        codes = self._copied(received.codes.view(torch.uint8), places).view(torch.float8_e4m3fn)
        scales = self._copied(pack_exponents(received.scales) if ue8m0 else received.scales, places)
        return SlotRows(Fp8Rows(codes, _column_major(scales)), counts, handle)

    def _places(self, row_experts: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [R, L] int64 of each source for each expert, and the places [S, W] of `_Plan`.

        row_experts  [S, W] int64, as a compact result has them
        sources      [S] int64: each row's; anything in rows without experts
        """
        num_ranks, num_local = self.buffer.num_ranks, self._num_local
        # After an error they may be anything; no number may lead outside.
        there = (row_experts >= 0) & (row_experts < num_local)
        sources = sources.clamp(0, num_ranks - 1)
        columns = torch.where(there, row_experts, num_local)
        has_SL = sources.new_zeros(len(sources), num_local + 1).scatter_(1, columns, 1)
        counts_RL = sources.new_zeros(num_ranks, num_local + 1).index_add_(0, sources, has_SL)
        before_SL = has_SL.cumsum(0) - has_SL
        if self._order is not None:
            # Compact rows lie in the buffer's order of sources, an expert's rows in that of ranks.
            in_order = counts_RL[self._order]
            begins = torch.empty_like(counts_RL).index_copy_(0, self._order, in_order.cumsum(0) - in_order)
            before_SL += (counts_RL.cumsum(0) - counts_RL - begins)[sources]
        rows = before_SL.gather(1, columns).clamp(0, self._num_rows - 1)
        places = columns * self._num_rows + torch.where(there, rows, 0)
        return counts_RL[:, :num_local], places

    def _copied(self, rows: Tensor, places: Tensor) -> Tensor:
        """[L, S, n] of rows [S, n]: each at its places. The rest is not written."""
        num_places = self._num_local * self._num_rows
        # One more takes what has no expert.
        spread = rows.new_empty(num_places + 1, rows.shape[1])
        for column in places.unbind(1):
            spread.index_copy_(0, column, rows)
        return spread[:num_places].view(self._num_local, self._num_rows, rows.shape[1])

    def _weighted(self, rows: Tensor, row_weights: Tensor, places: Tensor) -> Tensor:
        """[S, H] float32: for each compact row the sum over its experts, ascending, of weight * row, rounded
        to the wire.
        """
        num_places = self._num_local * self._num_rows
        flat = rows.view(num_places, rows.shape[2])
        sums = rows.new_zeros(self._num_rows, rows.shape[2], dtype=torch.float32)
        for column, weights in zip(places.unbind(1), row_weights.unbind(1), strict=True):
            there = column < num_places
            product = weights[:, None] * flat[torch.where(there, column, 0)].to(torch.float32)
            sums = torch.where(there[:, None], sums + product, sums)
        return sums.to(torch.bfloat16).to(torch.float32) if self._rounds_sums else sums


def _column_major(scales: Tensor) -> Tensor:
    """A copy of [L, S, n] whose rows have the stride 1."""
    num_local, num_rows, columns = scales.shape
    copy = scales.new_empty(num_local, columns, num_rows).transpose(1, 2)
    return copy.copy_(scales)
