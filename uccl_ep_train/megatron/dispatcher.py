"""START HERE. Megatron's six dispatcher stages, and their calls of a `Buffer`.

    dispatch_preprocess   [S/TP,B,H] -> [n,H]; routing map and probabilities -> [n, EP*TP, L]   (Megatron's)
    token_dispatch        Manager.dispatch: Buffer.dispatch -> expert-major rows [R,H]
    dispatch_postprocess  rows, rows per expert, probability per row: already as the experts want them
    combine_preprocess    nothing left to do
    token_combine         Manager.combine: Buffer.combine -> [n,H]
    combine_postprocess   [n,H] -> [S/TP,B,H]                                                  (Megatron's)

n tokens of this rank, E experts, L local experts, TP expert tensor parallel size, EP expert parallel size,
R received rows. The communication group is TP x EP with E*TP virtual experts: every expert-TP rank receives
the token, and the sum in combine doubles as the reduce-scatter over TP.

The dispatcher is a subclass of Megatron's flex dispatcher, whose stages use a `_comm_manager`. Megatron's
1F1B overlap schedule and CUDA graphs access that manager's attributes by name.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher, MoETokenDispatcher

from uccl_ep_train.common.opaque import opaque
from uccl_ep_train.common.shown import shown
from uccl_ep_train.errors import ConfigError, RoutingError
from uccl_ep_train.megatron.buffers import BufferPool, row_padding
from uccl_ep_train.megatron.compat import UnsupportedMegatronError
from uccl_ep_train.megatron.recompute import save_plan, saved_plan


class UcclEpTokenDispatcher(MoEFlexTokenDispatcher):
    """Megatron's flex dispatcher with a `Manager` of this package. Built by `MoELayer` once the plug-in is
    enabled.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
        *,
        pool: BufferPool,
    ) -> None:
        # Not the direct parent's: it would look for the HybridEP package.
        MoETokenDispatcher.__init__(self, config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        ep_rank = torch.distributed.get_rank(self.ep_group)
        group_rank = torch.distributed.get_rank(self.tp_ep_group)
        if group_rank != ep_rank * self.tp_size + self.tp_rank:
            raise UnsupportedMegatronError(
                f"rank {group_rank} of the expert TP x EP group has expert TP rank {self.tp_rank} of "
                f"{self.tp_size} and EP rank {ep_rank}; the plug-in knows groups with expert TP minor"
            )
        self._comm_manager = UcclEpManager(
            buffer=pool.buffer(self.tp_ep_group, config, self.tp_size, self.ep_size, user=self),
            num_virtual_experts=self.tp_size * config.num_moe_experts,
            config=config,
        )
        if getattr(config, "moe_router_dtype", None) == "fp64" and group_rank == 0:
            _say_what_fp64_becomes()
        # State that dispatch_preprocess leaves on the manager must survive its CUDA graph.
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.routing_map"]

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Raises what Megatron raises where its flex dispatcher overlaps no shared experts (0.16, 0.17)."""
        super().set_shared_experts(shared_experts)
        self.shared_experts = _InMegatronsShape(shared_experts, self)

    @property
    def buffer(self) -> Any:
        """The `Buffer` that this layer shares with all layers of its group."""
        return self._comm_manager.buffer

    @property
    def routing_map(self) -> torch.Tensor | None:
        """Of the latest forward pass: bool [n, E*TP], as it was dispatched."""
        return self._comm_manager.routing_map

    def before_step(self) -> None:
        """Before every step of a torch optimizer. Raises RoutingError."""
        self._comm_manager.check_captured_counts()


class _InMegatronsShape:
    """Shared experts that a flex dispatcher gives rows [n,H] get them as all-to-all's do, [S/TP,B,H].

    With the gate of shared experts a row has three gradients, and the shape says which two are added first.
    """

    def __init__(self, shared_experts: Any, dispatcher: UcclEpTokenDispatcher) -> None:
        self._shared_experts = shared_experts
        self._dispatcher = weakref.ref(dispatcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared_experts, name)

    def pre_forward_comm(self, rows: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        dispatcher: Any = self._dispatcher()
        self._shared_experts.pre_forward_comm(rows.view(dispatcher.hidden_shape), *args, **kwargs)

    def get_output(self) -> torch.Tensor:
        """[n,H]"""
        output: torch.Tensor = self._shared_experts.get_output()
        return output.view(-1, output.shape[-1])


class UcclEpManager:
    """Dispatch and combine of one layer. Attribute names and call signatures are Megatron's."""

    def __init__(self, buffer: Any, num_virtual_experts: int, config: Any) -> None:
        self.buffer = buffer
        self.config = config  # read in every forward pass, as Megatron does: fields may change between them
        self.num_virtual_experts = num_virtual_experts
        # Set: each rank has a budget of rows, whatever comes, and the host reads no count. Megatron 0.17+
        # looks at the two tensors after a step; after one over budget it clears the factor, repeats the
        # step, grows the budget and sets the factor again.
        self.moe_expert_rank_capacity_factor: float | None = getattr(
            config, "moe_expert_rank_capacity_factor", None
        )
        self.over_budget = torch.zeros(1, dtype=torch.bool, device=buffer.device)
        self.required_recv = torch.zeros(1, dtype=torch.int64, device=buffer.device)  # rows, the most so far
        self._least_budget = 0  # rows
        self._counts_captured = False
        self._other_counts = torch.zeros(1, dtype=torch.bool, device=buffer.device)
        self.routing_map: torch.Tensor | None = None  # bool [n, E*TP]
        self.token_probs: torch.Tensor | None = None  # router dtype [n, E*TP], zero where not routed
        self.dispatched_probs: torch.Tensor | None = None  # router dtype [R]
        self.tokens_per_expert: torch.Tensor | None = None  # int64 [L], padding included; see DispatchResult
        self._handle: Any = None
        self._hidden = 0  # elements of a row in the model

    @property
    def pads_map(self) -> bool:
        """Whether each expert's tokens are padded before they are sent."""
        return bool(getattr(self.config, "moe_router_padding_for_quantization", False))

    @property
    def expert_alignment(self) -> int:
        """Rows to a multiple of which each expert's segment is padded."""
        config = self.config
        # Quantised products, and those of TransformerEngine's grouped tensors, want segments of whole blocks.
        blocks = (
            config.fp8 or getattr(config, "fp4", None) or getattr(config, "moe_use_grouped_tensor", False)
        )
        # Megatron's experts rely on a flex dispatcher to do it (0: no need, in 0.17+), or copy what it left.
        wanted = get_align_size_for_quantization(config) if blocks or self.pads_map else 1
        return max(1, int(wanted))

    @property
    def _topk(self) -> int:
        """Virtual experts of a token."""
        return int(self.config.moe_router_topk * self.num_virtual_experts // self.config.num_moe_experts)

    @property
    def _capacity_factor(self) -> float | None:
        """Set: the router gives each expert alike, so that a CUDA graph may know the counts beforehand.

        Raises ConfigError.
        """
        if not getattr(self.config, "moe_pad_expert_input_to_capacity", False):
            return None
        factor = self.config.moe_expert_capacity_factor
        if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
            raise ConfigError(
                f"moe_expert_capacity_factor = {shown(factor)} with moe_pad_expert_input_to_capacity = True; "
                "allowed is a number >= 0"
            )
        return factor

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """routing_map bool, probs float, both [n, EP*TP, L]. Plain torch: Megatron compiles it."""
        num_tokens = routing_map.shape[0]
        self.routing_map = routing_map.reshape(num_tokens, self.num_virtual_experts)
        if self.pads_map:
            self.routing_map = _padded_map(self.routing_map, self.expert_alignment)
        self.token_probs = probs.reshape(num_tokens, self.num_virtual_experts)

    @opaque
    def dispatch(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """[n,H] -> rows [R,H]. The two flags describe streams that the buffer orders by itself.

        `token_probs` is read here and not in setup_metadata, because the 1F1B schedule puts a detached copy
        in between. Routing comes from the map, never from the probabilities: a routed one may be zero.
        """
        with self.buffer.preparing("dispatch"):
            assert self.token_probs is not None and self.routing_map is not None, "setup_metadata comes first"
            num_tokens, self._hidden = hidden_states.shape
            local_experts = self.buffer.config.num_experts // self.buffer.num_ranks
            rows_each = self._rows_of_each_expert(num_tokens)
            if not is_capturing():  # The host may read them.
                rows_each = None
            plan = saved_plan(self)
            if rows_each is not None:
                capacity: int | None = local_experts * rows_each
            else:  # With a plan: the plan's. The budget may have grown since.
                capacity = self._row_budget(num_tokens) if plan is None else None
            if is_capturing() and plan is None and capacity is None:
                raise ConfigError(
                    "the host cannot read the experts' counts while a CUDA graph is captured; allowed are "
                    "moe_pad_expert_input_to_capacity, moe_expert_rank_capacity_factor, and a graph without "
                    "the experts"
                )
            arguments: dict[str, Any] = {
                "x": self._padded(hidden_states),
                "routing_map": self.routing_map,
                # The wire is fp32; autograd undoes both casts, so a low-precision router loses nothing.
                "probs": self.token_probs.to(torch.float32),
                "handle": plan,
                "expert_alignment": self.expert_alignment,
                "capacity": capacity,
            }
        result = self.buffer.dispatch(**arguments)
        self.tokens_per_expert = result.tokens_per_expert
        if rows_each is not None:
            self._counts_captured = True
            self._other_counts |= result.overflow | result.tokens_per_expert.ne(rows_each).any()
            self.tokens_per_expert = torch.full((local_experts,), rows_each, device="cpu")
        elif result.overflow is not None:
            self.over_budget |= result.overflow
            needed = result.tokens_per_expert.sum(0, keepdim=True)
            torch.maximum(self.required_recv, needed, out=self.required_recv)
        save_plan(self, result.handle)
        self._handle = result.handle
        self.dispatched_probs = result.row_weights.to(self.token_probs.dtype)
        return self._unpadded(result.rows)

    def grow_recv_capacity(self, new_capacity: int) -> None:
        """From now on the budget is at least `new_capacity` rows."""
        self._least_budget = max(self._least_budget, new_capacity)

    def _row_budget(self, num_tokens: int) -> int | None:
        """Row budget of a rank with `num_tokens` tokens: the factor times the rows under balanced routing.
        None: no limit.
        """
        if self.moe_expert_rank_capacity_factor is None:
            return None
        budget = int(num_tokens * self._topk * self.moe_expert_rank_capacity_factor)
        budget = max(budget, self._least_budget)
        return budget + -budget % self.expert_alignment

    def _rows_of_each_expert(self, num_tokens: int) -> int | None:
        """Rows per expert under `moe_pad_expert_input_to_capacity`, if all ranks have `num_tokens` tokens."""
        if self._capacity_factor is None:
            return None
        of_a_rank = get_capacity(num_tokens * self._topk, self.num_virtual_experts, self._capacity_factor)
        if self.pads_map:
            of_a_rank = min(num_tokens, of_a_rank + -of_a_rank % self.expert_alignment)
        rows = of_a_rank * self.buffer.num_ranks
        return rows + -rows % self.expert_alignment

    def check_captured_counts(self) -> None:
        """Raises RoutingError if a graph with fixed counts got other counts."""
        if self._counts_captured and not is_capturing() and bool(self._other_counts):
            raise RoutingError(
                "in a CUDA graph, where the host cannot read them, experts got other numbers of rows than "
                "moe_pad_expert_input_to_capacity gives them; all ranks of the group need the same number of "
                "tokens there"
            )

    @opaque
    def combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """Rows [R,H] of the experts -> [n,H], the unweighted sum of each token's rows."""
        handle, self._handle = self._handle, None
        # The plan and the graph, which has plans of the layers below, must not outlive the micro-batch here.
        self.token_probs = self.dispatched_probs = None
        with self.buffer.preparing("combine"):
            rows = self._padded(hidden_states)
        return self._unpadded(self.buffer.combine(rows, handle))

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Adds zeros to each row if the model's rows are no multiple of 32."""
        padding = row_padding(self._hidden)
        return torch.nn.functional.pad(rows, (0, padding)) if padding else rows.contiguous()

    def _unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, : self._hidden].contiguous() if row_padding(self._hidden) else rows

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        return self.tokens_per_expert


def is_capturing() -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache  # once per process
def _say_what_fp64_becomes() -> None:
    print(
        "uccl_ep_train: moe_router_dtype = fp64: probabilities and their gradients travel in fp32, so "
        "results differ from alltoall's by this rounding",
        file=sys.stderr,
        flush=True,
    )


def _padded_map(routing_map: torch.Tensor, multiple: int) -> torch.Tensor:
    """Pads each expert's tokens to a multiple: adds the first tokens that it does not have, with probability
    0.

    Megatron's dispatcher makes the same choice for moe_router_padding_for_quantization, so experts see the
    same rows. Unlike Megatron's function it does not change the router's map.
    """
    missing_E = (-routing_map.sum(dim=0)) % multiple
    absent_TE = ~routing_map
    return routing_map | (absent_TE & (absent_TE.int().cumsum(dim=0) <= missing_E))
