"""What is measured: a case, the routing of one run of it, and the bytes that the run has to move.

Shape suffixes: N ranks, T tokens of a rank, K experts of a token, E experts, D domains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from uccl_ep_train.fp8 import BLOCK
from uccl_ep_train.topology import Topology

BF16_BYTES = 2
VALUE_BYTES = 4  # a router weight, fp32, per pair
ROUTINGS = ("uniform", "zipf", "one_hot")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of a sweep. Every rank has `tokens` BF16 rows; `dtype` is how dispatch sends them."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    ranks: int
    domains: int
    dtype: str
    routing: str
    link_gbytes_per_s: float

    @property
    def domain_size(self) -> int:
        return self.ranks // self.domains

    @cached_property
    def topology(self) -> Topology:
        return Topology.split(self.ranks, self.domain_size)

    @property
    def row_bytes(self) -> int:
        """Of a tensor's row, in and out."""
        return BF16_BYTES * self.hidden

    def wire_row_bytes(self, dtype: str) -> int:
        """Of a row between ranks: FP8 codes carry their scales, padded to 16 bytes."""
        if dtype == "bf16":
            return BF16_BYTES * self.hidden
        scales = 4 * self.hidden // BLOCK
        return self.hidden + (scales + 15) // 16 * 16

    def __str__(self) -> str:
        link = f", link {self.link_gbytes_per_s:g} GB/s" if self.link_gbytes_per_s else ""
        return (
            f"T={self.tokens} H={self.hidden} top-{self.topk} of {self.experts}, {self.ranks} ranks in "
            f"{self.domains} domain{'s' if self.domains > 1 else ''}, {self.dtype}, {self.routing}{link}"
        )


def draw_routing(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """topk_idx [N, T, K] int64 and weights [N, T, K] fp32 of all ranks: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    popularity_E = torch.zeros(case.experts)
    if case.routing == "zipf":
        popularity_E = -torch.arange(1, case.experts + 1).log()
        popularity_E = popularity_E[torch.randperm(case.experts, generator=generator)]
    elif case.routing == "one_hot":  # every token goes to it, its other experts are uniform
        popularity_E[seed % case.experts] = 1e3
    uniform_NTE = torch.rand(case.ranks, case.tokens, case.experts, generator=generator).clamp_min(1e-30)
    # Gumbel's trick: the k largest are a draw without replacement by popularity.
    scores_NTE = popularity_E - (-uniform_NTE.log()).log()
    topk_idx_NTK = scores_NTE.topk(case.topk, dim=-1).indices
    weights_NTK = torch.rand(topk_idx_NTK.shape, generator=generator) + 0.1
    return topk_idx_NTK, weights_NTK / weights_NTK.sum(-1, keepdim=True)


class Traffic:
    """Rows and bytes that one run's routing implies; counted, not measured."""

    def __init__(self, case: Case, topk_idx_NTK: Tensor) -> None:
        self.case = case
        owner_NTK = topk_idx_NTK // (case.experts // case.ranks)
        wanted_NTN = torch.zeros(case.ranks, case.tokens, case.ranks, dtype=torch.int64)
        wanted_NTN.scatter_add_(2, owner_NTK, torch.ones_like(owner_NTK))
        domain_of_N = torch.tensor(case.topology.domain_of)
        reached_NTD = torch.stack(
            [(wanted_NTN[:, :, domain_of_N == d] > 0).any(-1) for d in range(case.domains)], -1
        )
        self.pairs_NN = wanted_NTN.sum(1)  # [source, owner]
        self.rows_NN = (wanted_NTN > 0).sum(1)  # a row once per owner
        self.rows_ND = reached_NTD.sum(1)  # a row once per domain
        self._domain_of_N = domain_of_N
        self._own_NN = torch.eye(case.ranks, dtype=torch.bool)

    def logical_bytes(self) -> int:
        """The busiest rank's pairs as BF16 rows, its own experts' too: what moves if nothing is saved."""
        sent, received = self.pairs_NN.sum(1).max(), self.pairs_NN.sum(0).max()
        return int(max(sent, received)) * self.case.row_bytes

    def pair_wire(self, op: str) -> tuple[int, int]:
        """(wire bytes, of them between domains) of an all-to-all of permuted rows: a BF16 row per pair."""
        values = VALUE_BYTES if op == "dispatch" else 0
        return self._busiest(self.pairs_NN * (self.case.row_bytes + values))

    def row_wire(self, op: str) -> tuple[int, int]:
        """(wire bytes, of them between domains) of our way: a row once per rank, and once per domain."""
        case, topology = self.case, self.case.topology
        row = case.wire_row_bytes(case.dtype if op == "dispatch" else "bf16")
        value = VALUE_BYTES if op == "dispatch" else 0
        hop_NN = self.rows_NN * row + self.pairs_NN * value
        moved_NN = torch.zeros_like(hop_NN)
        for src in range(case.ranks):
            for d, members in enumerate(topology.members):
                holder = src if d == topology.domain_of[src] else topology.rail(src, d)
                if holder != src:
                    pairs = self.pairs_NN[src, list(members)].sum()
                    moved_NN[src, holder] += self.rows_ND[src, d] * row + pairs * value
                for dst in members:
                    moved_NN[holder, dst] += hop_NN[src, dst]
        # Combine goes the same way back; a rank's outgoing and incoming bytes change places.
        return self._busiest(moved_NN)

    def least_copies(self, op: str, rank: int) -> dict[str, int]:
        """Bytes that `rank` must at least write in our way, by where they go."""
        case, topology = self.case, self.case.topology
        own = topology.domain_of[rank]
        landing = sum(
            int(self.rows_ND[src, own])
            for src in range(case.ranks)
            if topology.domain_of[src] != own and topology.rail(src, own) == rank
        )
        if op == "dispatch":
            row = case.wire_row_bytes(case.dtype)
            return {
                "staging": int(self.rows_ND[rank].sum()) * row,
                "landing": landing * row,
                "slots": int(self.pairs_NN[:, rank].sum()) * case.row_bytes,
            }
        returned = int(self.rows_ND[rank].sum() - self.rows_ND[rank, own])
        return {
            "pieces": int(self.rows_NN[:, rank].sum()) * case.row_bytes,
            "relayed": landing * case.row_bytes,
            "returned": returned * case.row_bytes,
            "output": case.tokens * case.row_bytes,
        }

    def _busiest(self, moved_NN: Tensor) -> tuple[int, int]:
        """The largest of what leaves and what enters a rank, in all and between domains."""
        crosses_NN = self._domain_of_N[:, None] != self._domain_of_N[None, :]
        wire_NN = moved_NN.masked_fill(self._own_NN, 0)
        link_NN = moved_NN.masked_fill(~crosses_NN, 0)
        return tuple(int(max(m.sum(0).max(), m.sum(1).max())) for m in (wire_NN, link_NN))  # type: ignore[return-value]
