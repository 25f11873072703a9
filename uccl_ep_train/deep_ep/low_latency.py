"""The low-latency calls of DeepEP's first interface, over `uccl_ep_train.LowLatency`.

Shapes: T tokens, M the most tokens of any rank, R ranks, H hidden, K experts per token, E experts, L experts
of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from uccl_ep_train.api.low_latency import LowLatency, Sent
from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.common.shown import shown
from uccl_ep_train.common.slots import SlotHandle, SlotStatistics
from uccl_ep_train.deep_ep.checks import check, check_number, columns_of
from uccl_ep_train.deep_ep.config import MOST_TOKENS, MOST_TOPK, low_latency_bytes
from uccl_ep_train.deep_ep.engines import Engines
from uccl_ep_train.deep_ep.scales import Rows
from uccl_ep_train.deep_ep.utils.event import EventOverlap
from uccl_ep_train.errors import DtypeError, InputError, ShapeError
from uccl_ep_train.settings.checks import MAX_EXPERTS, MAX_HIDDEN

Hook = Callable[[], None]

OF_OVERLAP = {
    "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms", "src_signals",
    "src_signal_expect_value",
}  # fmt: skip

HINTED: dict[int, tuple[int, int, int]] = {}
"""By bytes that a hint gave: tokens, hidden and experts that it was asked for."""


class LowLatencyHandle(tuple[Any, ...]):
    """(src_info [L, R * M] int32, layout_range [L, R] int64, M, H, E), and what a combine needs."""

    calls: LowLatency
    slots: SlotHandle

    @classmethod
    def of(cls, calls: LowLatency, slots: SlotHandle, num_experts: int) -> LowLatencyHandle:
        handle = cls((slots.source_tokens, slots.ranges, slots.max_tokens, slots.hidden, num_experts))
        handle.calls, handle.slots = calls, slots
        return handle

    @cached_property
    def next_rows(self) -> Tensor:
        """[L, R * M, H] bfloat16, for the experts' outputs."""
        source_tokens = self.slots.source_tokens
        shape = (*source_tokens.shape, self.slots.hidden)
        return torch.empty(shape, dtype=torch.bfloat16, device=source_tokens.device)


def counter(given: Tensor | None, rank: int) -> Tensor | None:
    """[R] of a caller's [R], or its row of a caller's [R, R]."""
    return given[rank] if isinstance(given, Tensor) and given.dim() == 2 and len(given) > rank else given


def check_hook(async_finish: bool, return_recv_hook: bool) -> None:
    """Raises `InputError`."""
    if async_finish and return_recv_hook:
        raise InputError("async_finish with return_recv_hook; allowed is one of them")


def check_overlap(overlap: bool, beside: dict[str, object]) -> None:
    """Raises `InputError`, and `TypeError` where beside has other names than UCCL-EP."""
    unknown = beside.keys() - OF_OVERLAP
    if unknown:
        raise TypeError(f"low_latency_combine() got an unexpected keyword argument {min(unknown)!r}")
    if overlap:
        raise InputError(f"overlap = {shown(overlap)}; allowed is False")


@opaque_methods
class LowLatencyCalls:
    """What `Buffer` has for it, beside what it needs of a buffer."""

    num_sms: int
    num_rdma_bytes: int
    rank: int
    group_size: int
    low_latency_mode: bool
    enable_shrink: bool
    _engines: Engines

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of a rank: what an engine for so many tokens takes. A buffer that is made with them makes the
        engine at once; else the first dispatch does.
        """
        asked = (num_max_dispatch_tokens_per_rank, hidden, num_experts)
        names = ("num_max_dispatch_tokens_per_rank", "hidden", "num_experts", "num_ranks")
        for name, value in zip(names, (*asked, num_ranks), strict=True):
            check_number(name, value, 1)
        num_bytes = low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)
        HINTED[num_bytes] = asked
        return num_bytes

    def _make_low_latency(self) -> None:
        """Where the bytes are a hint's. Ranks may fail before their first call, and others go on."""
        asked = HINTED.get(self.num_rdma_bytes)
        if self.low_latency_mode and asked is not None:
            self._engines.low_latency(*asked, type(self).num_sms)

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends each token into slots of its experts: see `LowLatency.dispatch`.

        x                                   [T, H] bfloat16
        topk_idx                            [T, K] int64, -1: none; K at most 16
        num_max_dispatch_tokens_per_rank    M, equal on all ranks
        cumulative_local_expert_recv_stats  [L] int32, or None: rows of each expert are added
        dispatch_wait_recv_cost_stats       [R] or [R, R] int64, or None: nanoseconds that this rank waited
                                            for each other one to enter are added
        use_fp8                             rows are (codes [L, R * M, H], scales [L, R * M, ceil(H / 128)]
                                            float32, column-major); else bfloat16
        round_scale                         scales are powers of two
        use_ue8m0                           and come as exponents, four in an int32
        return_recv_hook                    rows come when the hook is called, and no SM is held until then

        Returns (recv_x, recv_count [L] int32, handle, event, hook). Raises what `LowLatency.dispatch` raises.
        """
        with self._engines.preparing(low_latency=True):
            check_hook(async_finish, return_recv_hook)
            if use_ue8m0 and not round_scale:
                raise InputError("use_ue8m0 without round_scale; allowed is both")
            if not self.low_latency_mode:
                raise InputError("low_latency_mode = False; allowed is True for low-latency calls")
            if columns_of("topk_idx", topk_idx) > MOST_TOPK:
                raise ShapeError(f"topk_idx has {topk_idx.shape[1]} columns; allowed are {MOST_TOPK}")
            waited = counter(dispatch_wait_recv_cost_stats, self.rank)
            most, hidden = num_max_dispatch_tokens_per_rank, columns_of("x", x)
            most = check_number("num_max_dispatch_tokens_per_rank", most, 1, MOST_TOKENS)
            num_experts = check_number("num_experts", num_experts, 1, MAX_EXPERTS)
            calls = self._engines.low_latency(most, hidden, num_experts, type(self).num_sms)

        def send() -> Any:
            with calls.buffer.preparing("low-latency dispatch"):
                rows = x.contiguous()
            return (calls.send_dispatch if return_recv_hook else calls.dispatch)(
                rows,
                topk_idx,
                wire="bf16" if not use_fp8 else "fp8" if round_scale else "fp8_fp32",
                ue8m0=use_ue8m0,
                statistics=SlotStatistics(cumulative_local_expert_recv_stats, waited),
            )

        sent, event = self._engines.run(send, (x, topk_idx), None, async_finish)
        got = sent.result if isinstance(sent, Sent) else sent
        rows: Rows = (got.rows.codes, got.rows.scales) if isinstance(got.rows, Fp8Rows) else got.rows
        handle = LowLatencyHandle.of(calls, got.handle, num_experts)
        return rows, got.counts, handle, event, _hook_of(sent)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        overlap: bool = False,
        **of_overlap: object,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Sums each token's rows times their weights: see `LowLatency.combine`.

        x             [L, R * M, H] bfloat16, in the slots of the dispatch
        topk_weights  [T, K] float32
        use_logfmt    ignored: rows travel in bfloat16, which is more exact
        zero_copy     rows are those of get_next_low_latency_combine_buffer(handle), not x
        out           [T, H] bfloat16, or None
        overlap       True is refused, as by UCCL-EP. What it has beside is ignored

        Returns (combined_x [T, H], event, hook). Raises what `LowLatency.combine` raises.
        """
        with self._engines.preparing(low_latency=True):
            check_hook(async_finish, return_recv_hook)
            check_overlap(overlap, of_overlap)
            calls, waited = _of_dispatch(handle).calls, counter(combine_wait_recv_cost_stats, self.rank)
        with calls.buffer.preparing("low-latency combine"):
            if not zero_copy and not isinstance(x, Tensor):
                raise DtypeError(f"x is {type(x).__name__}; allowed is a torch.Tensor")
            rows = handle.next_rows if zero_copy else x.contiguous()

        def send() -> Any:
            return (calls.send_combine if return_recv_hook else calls.combine)(
                rows, topk_idx, topk_weights, handle.slots, out=out, waited_ns=waited
            )

        sent, event = self._engines.run(send, (rows, topk_idx, topk_weights), None, async_finish)
        combined = sent.result if isinstance(sent, Sent) else sent
        return combined, event, _hook_of(sent)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """[L, R * M, H] bfloat16, for a combine with zero_copy. Raises `DtypeError`."""
        return _of_dispatch(handle).next_rows

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing has to be cleaned: flags only grow. With `enable_shrink` ranks meet, and mask who is
        missing.
        """
        if not self.enable_shrink:
            return
        check_number("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1, MOST_TOKENS)
        check_number("hidden", hidden, 1, MAX_HIDDEN)
        check_number("num_experts", num_experts, 1, MAX_EXPERTS)
        calls = self._engines.low_latency(
            num_max_dispatch_tokens_per_rank, hidden, num_experts, type(self).num_sms
        )
        device = calls.buffer.device
        x = torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
        calls.dispatch(x, torch.empty(0, 1, dtype=torch.int64, device=device), wire="bf16")

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """mask_status [R] int32 becomes 1 for each masked rank, else 0. Raises `DtypeError`, `ShapeError`."""
        check("mask_status", mask_status, (self.group_size,), torch.int32)
        calls = self._engines.last_low_latency()
        if calls is None:
            mask_status.zero_()
        else:
            mask_status.copy_(calls.masked_ranks())

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Refused: ranks agree on masks by themselves. Raises `InputError`."""
        raise InputError(
            f"low_latency_update_mask_buffer({rank_to_mask}, {mask}); allowed are enable_shrink, which "
            "masks, and low_latency_clean_mask_buffer(), which takes all ranks back"
        )

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes masked ranks back. With `enable_shrink` collective, also for them; else nothing is done.

        Low-latency engines are made anew: earlier handles raise `ClosedError`, and graphs must be captured
        again. Raises what the creation of a `uccl_ep_train.Buffer` raises, if a rank does not come.
        """
        self._engines.renew_low_latency()


def _of_dispatch(handle: LowLatencyHandle) -> LowLatencyHandle:
    """Raises `DtypeError`."""
    if not isinstance(handle, LowLatencyHandle):
        raise DtypeError(f"handle is {type(handle).__name__}; allowed is what a dispatch returned")
    return handle


def _hook_of(sent: Any) -> Hook | None:
    if not isinstance(sent, Sent):
        return None

    def hook() -> None:
        sent.receive()

    return hook
