"""`ElasticBuffer` of DeepEP's second interface: the same calls, over a `uccl_ep_train.Buffer`.

Expanded rows are the engine's expert-major rows, others its compact ones.

Shapes: T tokens, M the most tokens of a rank, R ranks, H hidden, K experts per token, E experts, L experts of
this rank, N received rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer as Engine
from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.common.uncopied import Uncopied
from uccl_ep_train.core.routing import check_combine_rows
from uccl_ep_train.deep_ep.checks import MOST_SMS, check, check_experts, check_number, columns_of
from uccl_ep_train.deep_ep.config import DEFAULT_BYTES, RANKS_OF_NODE
from uccl_ep_train.deep_ep.elastic_handle import Asked, EPHandle
from uccl_ep_train.deep_ep.elastic_sending import Received, by_expert, send, send_again
from uccl_ep_train.deep_ep.engines import Engines, check_event, check_group
from uccl_ep_train.deep_ep.scales import Rows, aligned_columns, cut, widened
from uccl_ep_train.deep_ep.utils.event import EventHandle, EventOverlap
from uccl_ep_train.errors import DtypeError, InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SMS = {True: 24, False: 48}  # by prefer_overlap_with_compute

Event = EventOverlap | EventHandle
_buffers: weakref.WeakSet[ElasticBuffer] = weakref.WeakSet()


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise InputError(f"{name}() is not there; allowed are dispatch, combine, barrier and all_gather")

    return refuse


def _ignored(*_: object, **__: object) -> None:
    """What DeepEP needs around `all_gather`."""


@opaque_methods
class ElasticBuffer(Uncopied):
    """One rank's end, for a group of ranks.

    group                        its ranks
    num_bytes                    upper limit of an engine's memory; None: 1 GiB
    num_max_tokens_per_rank      the default of `dispatch`
    allow_multiple_reduction     False: sums are rounded once. Then FP32 travels between and inside domains
    prefer_overlap_with_compute  24 SMs, else 48, where `dispatch` is given none

    `num_cpu_bytes` is refused: `InputError`. The others are ignored: rows cross a network once per domain,
    results are the same in every run, and a buffer that is dropped without `destroy` leaves its group, too.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        check_group(group, num_bytes=num_bytes or 0)
        check_number("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        if num_cpu_bytes != 0:
            raise InputError(f"num_cpu_bytes = {num_cpu_bytes}; allowed is 0")
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_bytes = DEFAULT_BYTES if num_bytes is None else num_bytes
        self.num_max_tokens_per_rank, self.deterministic = num_max_tokens_per_rank, deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or 1
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        outgrown = self._outgrown()
        self._engines = Engines(
            group, self.num_bytes, None if allow_multiple_reduction else "fp32", in_place_of=outgrown
        )
        _buffers.add(self)

    # ---- what callers ask

    @staticmethod
    def capture() -> EventHandle:
        """The current stream's work up to now."""
        return EventHandle()

    @staticmethod
    def get_buffer_size_hint(*_: object, **__: object) -> int:
        """Bytes: what a buffer takes at most, whatever the arguments are."""
        return DEFAULT_BYTES

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of calls with `async_with_compute_stream`. On GPUs only."""
        return self._engines.comm_stream()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """As if a node had eight ranks: (nodes, ranks of a node)."""
        return -(-self.num_ranks // RANKS_OF_NODE), min(self.num_ranks, RANKS_OF_NODE)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, R): to the caller all ranks are alike."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, **_: float
    ) -> int:
        """What `dispatch` takes if it is given none. Rates are ignored."""
        if num_scaleout_topk != 0:
            raise InputError(f"num_scaleout_topk = {num_scaleout_topk}; allowed is 0")
        return _SMS[self.prefer_overlap_with_compute]

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """`num_allocated_qps`: the engine chooses its own."""
        return self.num_allocated_qps

    # ---- dispatch and combine

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to every rank that has one of its experts.

        x                 as `Buffer.dispatch` takes it
        topk_idx          [T, K] int64, -1: none; topk_weights [T, K] float32, or None on all ranks
        cumulative_local_expert_recv_stats  [L] int32: the counts of a new routing are added, without padding
        num_max_tokens_per_rank             M, at least T, equal on all ranks; None: the buffer's
        expert_alignment  rows: of the list and, expanded, of each expert's rows; None: 1
        handle            of an earlier dispatch: the same routing and layout; topk_idx must be None
        do_cpu_sync       False: the host waits for no count. N is R * M; expanded, R * M * min(K, L) and the
                          most padding, of which what follows the last expert is not written
        do_expand         a row for each expert, by expert, then source, then token. Padding between experts
                          is zeros (scales 1), whatever `do_zero_padding` says
        use_tma_aligned_col_major_sf        scales lie column by column, each a multiple of 16 bytes

        Returns (recv_x, recv_topk_idx [N, K] of this rank's experts or -1, recv_topk_weights [N, K], handle,
        event), by source rank, then token. Expanded: recv_topk_idx is None, the weights are [N].

        Raises `InputError`, and what `uccl_ep_train.Buffer.dispatch` raises.
        """
        wanted = (num_experts, num_max_tokens_per_rank, expert_alignment)
        with self._engines.preparing():
            engine = None if handle is None else _engine(handle)
            columns = columns_of("x", x, quantised=True) if handle is None else 0
            check_number("num_sms", num_sms or 0, 0, MOST_SMS)
            for event in (previous_event, previous_event_before_epilogue):
                check_event(event)
        with self._engines.preparing() if engine is None else engine.preparing("dispatch"):
            if do_zero_padding and not do_expand:
                raise InputError("do_zero_padding = True without do_expand; allowed is False")
            if handle is None:
                tokens = len(x[0] if isinstance(x, tuple) else x)
                asked = self._asked(tokens, wanted, do_cpu_sync, do_expand)
                num_sms = num_sms or _SMS[self.prefer_overlap_with_compute]
                sender = self._engines.sender(asked.num_experts, columns, num_sms)
            else:
                _check_same(handle, wanted, topk_idx, (do_cpu_sync, do_expand))
        stats = cumulative_local_expert_recv_stats

        def run() -> Received:
            if previous_event_before_epilogue is not None:
                previous_event_before_epilogue.current_stream_wait()
            if handle is not None:
                got = send_again(handle, x, topk_weights)
            else:
                got = send(sender, asked, x, (topk_idx, topk_weights), stats, do_handle_copy)
            rows = got[0]
            if use_tma_aligned_col_major_sf and isinstance(rows, tuple):
                rows = (rows[0], aligned_columns(rows[1]))
            return rows, *got[1:]

        given = (x, topk_idx, topk_weights, stats, handle)
        received, event = self._engines.run(run, given, previous_event, async_with_compute_stream)
        return *received, event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums each token's rows, without weights. Weights return to the columns that they came from.

        x             [N, H] bfloat16
        topk_weights  [N, K] float32, expanded [N]; or None on all ranks
        bias          [T, H] bfloat16, one or two: the first addends of each sum

        Returns (combined_x [T, H], combined_topk_weights [T, K] or None, event). Raises `InputError`, and
        what `uccl_ep_train.Buffer.combine` raises.
        """
        with self._engines.preparing():
            engine, plan = _engine(handle), handle.plan
            for event in (previous_event, previous_event_before_epilogue):
                check_event(event)
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        with engine.preparing("combine"):
            columns_of("x", x)
            if topk_weights is not None:
                shape = (len(x),) if handle.do_expand else (len(x), handle.topk_idx.shape[1])
                check("topk_weights", topk_weights, shape, torch.float32)

        def run() -> tuple[Tensor, Tensor | None]:
            if previous_event_before_epilogue is not None:
                previous_event_before_epilogue.current_stream_wait()
            with engine.preparing("combine"):
                rows, wide = widened(x), tuple(widened(bias) for bias in biases)
                check_combine_rows(rows, plan, engine.config, engine.device)
                ordered = None if topk_weights is None else by_expert(topk_weights, handle)
            if ordered is None:
                return cut(engine.combine(rows, plan, bias=wide), x), None
            out, weights = engine.combine_gradients(plan, wide)(rows, ordered)
            return cut(out, x), weights

        given = (x, topk_weights, biases, handle)
        (out, weights), event = self._engines.run(run, given, previous_event, async_with_compute_stream)
        return out, weights, event

    # ---- other operations of the group

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Returns when every rank's GPU has done what was queued before. The host waits, too."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier(group=self.group)

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """By torch.distributed: a tensor [R, ...] for each of t, and a function that waits for them."""
        tensors = (t,) if isinstance(t, Tensor) else tuple(t)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise DtypeError(f"t has {type(tensor).__name__}; allowed is a torch.Tensor, or several")
        gathered = [tensor.new_empty((self.num_ranks, *tensor.shape)) for tensor in tensors]
        pending = [
            dist.all_gather(list(every.unbind()), tensor.contiguous(), self.group, async_op=True)
            for every, tensor in zip(gathered, tensors, strict=True)
        ]

        def wait() -> None:
            for work in pending:
                work.wait()

        return *gathered, wait

    agrs_set_config = create_agrs_session = destroy_agrs_session = _ignored
    get_agrs_buffer_size_hint = get_agrs_num_max_session_bytes = get_buffer_size_hint

    def agrs_new_session(self, enabled: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def destroy(self) -> None:
        """Collective: leaves the group. A buffer that stands in place of this one stays."""
        self._engines.destroy()

    def _outgrown(self) -> Engines | None:
        """Of the buffer that this one stands in place of: the same, but for fewer tokens.

        Callers make such a one when a batch is larger than all before, on the ranks that have it. Engines
        take any number of tokens, so no rank has to wait for the others.
        """
        found = [
            earlier
            for earlier in _buffers
            if earlier.group is self.group
            and earlier.num_bytes == self.num_bytes
            and earlier.allow_multiple_reduction == self.allow_multiple_reduction
            and earlier.num_max_tokens_per_rank < self.num_max_tokens_per_rank
            and not earlier._engines.destroyed
        ]
        largest = max(found, key=lambda earlier: earlier.num_max_tokens_per_rank, default=None)
        return None if largest is None else largest._engines

    engram_write = _refused("engram_write")
    engram_fetch = _refused("engram_fetch")
    get_engram_storage_size_hint = _refused("get_engram_storage_size_hint")
    pp_set_config = _refused("pp_set_config")
    pp_send = _refused("pp_send")
    pp_recv = _refused("pp_recv")
    get_pp_buffer_size_hint = _refused("get_pp_buffer_size_hint")
    agrs_get_inplace_tensor = _refused("agrs_get_inplace_tensor")

    def _asked(
        self, tokens: int, wanted: tuple[int | None, int | None, int | None], sync: bool | None, expand: bool
    ) -> Asked:
        """wanted: num_experts, num_max_tokens_per_rank, expert_alignment"""
        most = self.num_max_tokens_per_rank if wanted[1] is None else wanted[1]
        alignment = 1 if wanted[2] is None else wanted[2]
        check_experts(wanted[0], self.num_ranks)
        most = check_number("num_max_tokens_per_rank", most, max(tokens, 1))
        alignment = check_number("expert_alignment", alignment, 1)
        return Asked(wanted[0] or 0, most, alignment, sync is None or bool(sync), expand)


def _engine(handle: EPHandle) -> Engine:
    if not isinstance(handle, EPHandle):
        raise DtypeError(f"handle is {type(handle).__name__}; allowed is an EPHandle of this buffer")
    return handle.sender.engine


def _check_same(
    handle: EPHandle,
    wanted: tuple[int | None, int | None, int | None],
    topk_idx: Tensor | None,
    how: tuple[bool | None, bool],
) -> None:
    """What is given with a handle is the handle's. how: do_cpu_sync, do_expand"""
    if topk_idx is not None:
        raise InputError("topk_idx with a handle; allowed is None")
    if how[0]:
        raise InputError("do_cpu_sync = True with a handle; allowed are False and None")
    if how[1] != handle.do_expand:
        raise InputError(f"do_expand = {how[1]} with a handle; allowed is {handle.do_expand}")
    for name, value in zip(
        ("num_experts", "num_max_tokens_per_rank", "expert_alignment"), wanted, strict=True
    ):
        if value not in (None, getattr(handle, name)):
            raise InputError(f"{name} = {value} with a handle; allowed are {getattr(handle, name)} and None")
