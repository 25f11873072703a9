"""`Buffer` of DeepEP's first interface: the same calls, over a `uccl_ep_train.Buffer`.

The engine is made by the first call that tells the number of experts and the row length, on all ranks
together, and again where a later call needs longer rows. Routing travels as metadata of the rows.

Shapes: T tokens, R ranks, H hidden, K experts per token, E experts, L experts of this rank, N received rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from uccl_ep_train.api.weights import combine_weights
from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.common.shown import shown
from uccl_ep_train.common.uncopied import Uncopied
from uccl_ep_train.core import topk
from uccl_ep_train.deep_ep.checks import MOST_SMS, check, check_experts, check_number, check_topk, columns_of
from uccl_ep_train.deep_ep.config import CONFIGURED_RANKS, RANKS_OF_NODE, Config, Runtime, check_config
from uccl_ep_train.deep_ep.engines import Engines, check_event, check_group
from uccl_ep_train.deep_ep.low_latency import LowLatencyCalls
from uccl_ep_train.deep_ep.scales import Rows, cut, engine_rows, widened
from uccl_ep_train.deep_ep.sending import Handle, Routing
from uccl_ep_train.deep_ep.utils.event import EventHandle, EventOverlap
from uccl_ep_train.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@opaque_methods
class Buffer(LowLatencyCalls, Uncopied):
    """One rank's end, for a group of ranks.

    group                          its ranks
    num_nvl_bytes, num_rdma_bytes  upper limit of an engine's memory, together; 0: 1 GiB
    explicitly_destroy             ignored: a buffer that is dropped without `destroy` leaves its group, too

    low_latency_mode               low-latency calls are allowed, too
    enable_shrink                  low-latency calls go on without ranks that no longer answer; after
                                   UCCL_EP_MASK_TIMEOUT_S, or 10 s

    `comm` is refused: `InputError`. The others are ignored.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
        is_intranode: bool | None = None,
    ) -> None:
        if enable_shrink and not low_latency_mode:
            raise InputError("enable_shrink without low_latency_mode; allowed is both")
        if comm is not None:
            raise InputError(f"comm = {shown(comm)}; allowed is None: pass a torch.distributed group")
        check_group(group, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        self.group = group
        self.rank, self.group_size = group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime: Runtime | None = Runtime(group)
        self._engines = Engines(group, num_nvl_bytes + num_rdma_bytes, outlives_ranks=enable_shrink)
        self._make_low_latency()

    # ---- what callers ask before they dispatch

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """For engines that are made from now on. Raises `InputError`."""
        check_number("num_sms", new_num_sms, 2, MOST_SMS)
        if new_num_sms % 2:
            raise InputError(f"num_sms = {new_num_sms}; allowed are even numbers")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 rows travel: always."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """The current stream's work up to now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        if num_ranks not in CONFIGURED_RANKS:
            raise InputError(f"num_ranks = {num_ranks}; allowed are {', '.join(map(str, CONFIGURED_RANKS))}")
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of calls with `async_finish`. On GPUs only."""
        return self._engines.comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Memory of the caller's own, zeros [size], or empty. An engine shows none of its memory, so there is
        nothing to clean.
        """
        return torch.zeros((0,) if size is None else size, dtype=dtype, device=self._engines.device())

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Returns (num_tokens_per_rank [R], num_tokens_per_rdma_rank [R / 8], num_tokens_per_expert [E],
        is_token_in_rank [T, R], event).

        Numbers are int32, is_token_in_rank is bool. Up to 8 ranks the second is None. topk_idx: [T, K] int64,
        -1: none. What is no expert is refused by the dispatch. Raises `InputError`.
        """
        ranks, of_node = self.group_size, RANKS_OF_NODE if self.group_size > RANKS_OF_NODE else 0
        check_experts(num_experts, ranks)
        check_event(previous_event)
        if of_node and ranks % of_node:
            raise InputError(f"{ranks} ranks; allowed are up to {of_node}, or multiples of it")
        check_topk(topk_idx)
        layout, event = self._engines.run(
            lambda: topk.layout_of(topk_idx.contiguous(), num_experts, ranks, of_node),
            (topk_idx,),
            previous_event,
            async_finish,
        )
        return *layout, event

    # ---- dispatch and combine

    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int], Handle | None, EventOverlap]:
        """Sends each token once to every rank that has one of its experts.

        x                 [T, H] bfloat16, or (codes [T, H] float8_e4m3fn, scales [T, ceil(H / 128)]
                          float32); or scales int32 of four exponents (UE8M0), [T, H / 512], or [T, H / 128]:
                          each of 32 columns. Of any strides
        handle            of an earlier dispatch: the same routing; topk_idx and topk_weights must be None
        topk_idx          [T, K] int64, -1: none; topk_weights [T, K] float32. Without them is_token_in_rank
                          [T, R] says where tokens go
        num_worst_tokens  rows of the output, whatever comes; those unused have recv_topk_idx -1, and the list
                          is empty; 0: as many as come

        Returns (recv_x, recv_topk_idx [N, K] of this rank's experts or -1, recv_topk_weights [N, K],
        num_recv_tokens_per_expert as a list, aligned, handle, event). With a handle all but the first and the
        last are None (an empty list). Rows are ordered by source rank, then token.

        Raises `InputError`, and what `uccl_ep_train.Buffer.dispatch` raises.
        """
        if handle is not None:
            with self._engines.preparing():
                engine, plan, _, *kept = Handle.of(handle)
                check_event(previous_event)
            with engine.preparing("dispatch"):
                if topk_idx is not None or topk_weights is not None:
                    raise InputError("topk_idx and topk_weights with a handle; allowed are None")

            def again() -> Rows:
                with engine.preparing("dispatch"):
                    rows = engine_rows(x)
                return cut(engine.dispatch(rows, handle=plan).rows, x)

            given = (x, tuple(kept), plan.storage)
            recv_x, event = self._engines.run(again, given, previous_event, async_finish)
            return recv_x, None, None, [], None, event
        with self._engines.preparing():
            config = Config(Buffer.num_sms) if config is None else config
            check_config(config)
            check_event(previous_event)
            for name, part in (
                ("is_token_in_rank", is_token_in_rank),
                ("num_tokens_per_expert", num_tokens_per_expert),
            ):
                if not isinstance(part, Tensor):
                    raise InputError(f"{name} is {type(part).__name__}; allowed is get_dispatch_layout()'s")
            assert is_token_in_rank is not None and num_tokens_per_expert is not None
            columns = columns_of("x", x, quantised=True)
            sender = self._engines.sender(num_tokens_per_expert.numel(), columns, config.num_sms)
            routing = Routing(is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        got, event = self._engines.run(
            lambda: sender.send(x, routing, expert_alignment, num_worst_tokens),
            (x, routing),
            previous_event,
            async_finish,
        )
        return got.rows, got.topk_idx, got.topk_weights, got.counts, got.handle, event

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums each token's rows over the ranks, without weights; weights are summed beside.

        x             [N, H] bfloat16
        topk_weights  [N, K] float32, or None
        bias          [T, H] bfloat16, one or two: the first addends of each sum

        Returns (combined_x [T, H], combined_topk_weights [T, K] or None, event). Raises `ShapeError`,
        `DtypeError`, and what `uccl_ep_train.Buffer.combine` raises.
        """
        with self._engines.preparing():
            engine, plan, num_topk, *kept = Handle.of(handle)
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        with engine.preparing("combine"):
            check_event(previous_event)
            columns_of("x", x)
            if topk_weights is not None:
                check("topk_weights", topk_weights, (len(x), num_topk), torch.float32)

        def run() -> tuple[Tensor, Tensor | None]:
            with engine.preparing("combine"):
                wide, rows = tuple(widened(bias) for bias in biases), widened(x).contiguous()
            out = cut(engine.combine(rows, plan, bias=wide), x)
            if topk_weights is None:
                return out, None
            with engine.preparing("combine"):
                weights = topk_weights.contiguous()
            return out, combine_weights(engine, weights, plan)

        given = (x, topk_weights, biases, tuple(kept), plan.storage)
        (out, weights), event = self._engines.run(run, given, previous_event, async_finish)
        return out, weights, event

    def destroy(self) -> None:
        """Collective: leaves the group."""
        self._engines.destroy()
        self.runtime = None
