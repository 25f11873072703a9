"""`EPHandle`: what a dispatch of DeepEP's second interface leaves, and what callers read in it.

Shapes: R ranks, M the most tokens of a rank, K experts per token, L experts of this rank, N received rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from uccl_ep_train.common.handle import DispatchResult
from uccl_ep_train.deep_ep.facts import Facts, fact
from uccl_ep_train.deep_ep.sending import Sender
from uccl_ep_train.deep_ep.utils.math import align


class Asked(NamedTuple):
    """What a dispatch with a new routing was asked for."""

    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    do_cpu_sync: bool
    do_expand: bool

    def most_tokens(self, num_ranks: int) -> int:
        return num_ranks * self.num_max_tokens_per_rank

    def most_expanded(self, num_ranks: int, num_topk: int) -> int:
        """A row for each expert that a token can have here, and the padding of each expert."""
        local = self.num_experts // num_ranks
        rows = self.most_tokens(num_ranks) * min(num_topk, local) + (self.expert_alignment - 1) * local
        return align(rows, self.expert_alignment)


class EPHandle(Facts):
    """For combines, and for dispatches with the same routing. Tensors are made when they are asked for.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch
    topk_idx                         [T, K] int64, a copy unless `do_handle_copy` is False
    num_recv_tokens_per_expert_list  L numbers, aligned; empty if the host does not know them
    num_expanded_tokens              their sum, or the most that can come
    dst_buffer_slot_idx, token_metadata_at_forward, channel_linked_list: empty, there are no slots or channels
    """

    def __init__(self, sender: Sender, asked: Asked, topk_idx: Tensor, result: DispatchResult) -> None:
        super().__init__(sender.engine.device)
        self.sender, self.plan, self.topk_idx = sender, result.handle, topk_idx
        self.num_experts, self.num_max_tokens_per_rank, self.expert_alignment = asked[:3]
        self.do_cpu_sync, self.do_expand = asked[3:]
        self.num_sms = sender.engine.config.gpu.num_sms
        assert result.metadata is not None
        self._metadata, self._tokens_per_expert = result.metadata, result.tokens_per_expert
        self._num_ranks = sender.engine.num_ranks
        self._most_tokens = asked.most_tokens(self._num_ranks)
        exact = self.plan.tokens_per_expert_exact or ()
        self.num_recv_tokens_per_expert_list = [align(count, self.expert_alignment) for count in exact]
        self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list)
        if not self.do_cpu_sync:
            self.num_expanded_tokens = asked.most_expanded(self._num_ranks, topk_idx.shape[1])
        self.dst_buffer_slot_idx = topk_idx.new_empty(0, dtype=torch.int32)
        self.token_metadata_at_forward = self.channel_linked_list = None

    @property
    def kept(self) -> tuple[Tensor | None, ...]:
        """What operations with the handle read."""
        return self._metadata, self._tokens_per_expert, self.topk_idx, self.plan.storage

    def recv_topk_idx(self) -> Tensor:
        """[N, K] int64: numbers among this rank's experts, or -1. Not of expanded rows."""
        local, _ = self.sender.unpacked(self._metadata, self.topk_idx.shape[1], has_weights=False)
        assert local is not None
        return local

    @fact
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        """[L] int32."""
        return self._exact.to(torch.int32)

    @fact
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """[L] int32: where each expert ends. Expanded rows: without its padding, else with it."""
        padded = (self._exact + self.expert_alignment - 1) // self.expert_alignment * self.expert_alignment
        ends = padded.cumsum(0)
        return (ends - padded + self._exact if self.do_expand else ends).to(torch.int32)

    @fact
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """[R] int32: tokens that this rank got from each rank and those before it."""
        return self._is_token_here.view(self._num_ranks, -1).sum(1).cumsum(0).to(torch.int32)

    @fact
    def num_recv_tokens(self) -> int:
        """Tokens that came, or the most that can come if the host does not know."""
        if not self.do_cpu_sync:
            return self._most_tokens
        return int(self.psum_num_recv_tokens_per_scaleup_rank[-1]) if self.do_expand else len(self._metadata)

    @fact
    def recv_src_metadata(self) -> Tensor:
        """[num_recv_tokens, 2 + K] int32, by source, then token: M * rank + token; K * rank + the first
        column that names an expert of this rank; for each column its expanded row, or -1. Unused rows are -1.
        """
        idx, rows = self._local_experts, torch.arange(len(self._metadata), device=self._metadata.device)
        # What belongs to no token goes to the last row, which is cut off.
        there = torch.cat([self._is_token_here, self._is_token_here.new_zeros(1)])
        place = torch.where(there, there.cumsum(0) - 1, self._most_tokens)[self._token]
        found = idx.new_full((self._most_tokens + 1, 2 + self.topk_idx.shape[1]), -1, dtype=torch.int32)
        found[place, 0] = self._token.to(torch.int32)
        first = (idx >= 0).to(torch.int32).argmax(1)
        found[place, 1] = ((self._metadata[:, 0] - 1) * idx.shape[1] + first).to(torch.int32)
        if self.do_expand:
            column = (idx == self._expert[:, None]).to(torch.int32).argmax(1)
            found[place, 2 + column] = rows.to(torch.int32)
        return found[: self._most_tokens][: self.num_recv_tokens]

    # ---- below: [N] of the rows, where there is no token in padding and in what is unused

    @fact
    def _expert(self) -> Tensor:
        """[N] int64 of expanded rows: the number among this rank's experts; L behind them."""
        ends = self._tokens_per_expert.to(self._metadata.device).cumsum(0)
        return torch.searchsorted(ends, torch.arange(len(self._metadata), device=ends.device), right=True)

    @fact
    def _has_token(self) -> Tensor:
        """[N] bool."""
        came = self._metadata[:, 0] > 0
        return came & (self._expert < len(self._tokens_per_expert)) if self.do_expand else came

    @fact
    def _token(self) -> Tensor:
        """[N] int64: M * rank + token, or M * R."""
        rank, token = self._metadata[:, :2].to(torch.int64).unbind(1)
        numbers = (rank - 1) * self.num_max_tokens_per_rank + token
        return torch.where(self._has_token, numbers, self._most_tokens)

    @fact
    def _is_token_here(self) -> Tensor:
        """[M * R] bool."""
        found = self._has_token.new_zeros(self._most_tokens + 1)
        found[self._token] = True
        return found[: self._most_tokens]

    @fact
    def _local_experts(self) -> Tensor:
        """[N, K] int64, -1: another rank's, or no token."""
        words = torch.where(self._has_token[:, None], self._metadata, 0)
        local, _ = self.sender.unpacked(words, self.topk_idx.shape[1], has_weights=False)
        assert local is not None
        return local

    @fact
    def _exact(self) -> Tensor:
        """[L] int64: tokens of each expert."""
        device, exact = self._metadata.device, self.plan.tokens_per_expert_exact
        if exact is not None:
            return torch.tensor(exact, dtype=torch.int64, device=device)
        if not self.do_expand:
            return self._tokens_per_expert.to(device)
        counts = self._expert.new_zeros(len(self._tokens_per_expert) + 1)
        return counts.index_add_(0, self._expert, self._has_token.to(torch.int64))[:-1]
