"""A case of the benchmark, the routing of one run, and the bytes that the run must move.

Shape suffixes: N ranks, T tokens of a rank, K experts of a token, E experts, D domains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bench.trace import load_trace
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.oracle.fp8 import wire_row_bytes

BF16_BYTES = 2
VALUE_BYTES = 4  # a router weight, fp32, per pair
ROUTINGS = ("uniform", "zipf", "one_hot", "trace")

OPS = ("dispatch", "combine")
BACKWARD = "forward_backward"  # both, and the backward of both
FORMS = ("topk", "map")

CAPACITY_SLACK = 1.1
CAPACITY_MULTIPLE = 128  # rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of a sweep. Every rank has `tokens` BF16 rows; `dtype` is how dispatch sends them.

    num_sms    limit of SMs for systems that have one; 0: their own default
    stage_sms  limit of SMs for staging of `uccl_ep`; 0: as num_sms
    trace      file that the routing "trace" is taken from
    form       form of the routing for `uccl_ep`: "topk" (indices) | "map" (Megatron's map of bools)
    """

    tokens: int
    hidden: int
    topk: int
    experts: int
    ranks: int
    domains: int
    dtype: str
    routing: str
    link_gbytes_per_s: float
    num_sms: int = 0
    stage_sms: int = 0
    trace: str = ""
    form: str = "topk"

    @property
    def problem(self) -> str:
        """Why no system can run this case, or ""."""
        if self.ranks % self.domains:
            return f"{self.ranks} ranks are no multiple of {self.domains} domains"
        if self.experts % self.ranks:
            return f"{self.experts} experts are no multiple of {self.ranks} ranks"
        if self.topk > self.experts:
            return f"top-{self.topk} of {self.experts} experts"
        if 0 < self.stage_sms < self.num_sms:
            return f"{self.stage_sms} SMs for staging are less than the {self.num_sms} of all steps"
        if self.routing == "trace":
            return load_trace(self.trace).problem(self.ranks * self.tokens, self.topk, self.experts)
        return ""

    @property
    def domain_size(self) -> int:
        return self.ranks // self.domains

    @cached_property
    def topology(self) -> Topology:
        return Topology.split(self.ranks, self.domain_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the input and output tensors."""
        return BF16_BYTES * self.hidden

    def wire_row_bytes(self, dtype: str) -> int:
        """Bytes of a row between ranks."""
        return wire_row_bytes(self.hidden, dtype)

    def __str__(self) -> str:
        limits = " as a map" if self.form == "map" else ""
        limits += f", {self.num_sms} SMs" if self.num_sms else ""
        if self.stage_sms:
            limits += (
                f", {self.stage_sms} for staging" if self.num_sms else f", {self.stage_sms} SMs for staging"
            )
        limits += f", link {self.link_gbytes_per_s:g} GB/s" if self.link_gbytes_per_s else ""
        return (
            f"T={self.tokens} H={self.hidden} top-{self.topk} of {self.experts}, {self.ranks} ranks in "
            f"{self.domains} domain{'s' if self.domains > 1 else ''}, {self.dtype}, {self.routing}{limits}"
        )


def draw_routing(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """topk_idx [N, T, K] int64 and weights [N, T, K] fp32 of all ranks: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    if case.routing == "trace":
        taken = load_trace(case.trace).draw(case.ranks * case.tokens, generator)
        return _weighted(taken.view(case.ranks, case.tokens, case.topk), generator)
    popularity_E = torch.zeros(case.experts)
    if case.routing == "zipf":
        popularity_E = -torch.arange(1, case.experts + 1).log()
        popularity_E = popularity_E[torch.randperm(case.experts, generator=generator)]
    elif case.routing == "one_hot":  # one expert gets every token; a token's other experts are uniform
        popularity_E[seed % case.experts] = 1e3
    uniform_NTE = torch.rand(case.ranks, case.tokens, case.experts, generator=generator).clamp_min(1e-30)
    # Gumbel trick: the k largest scores are a draw without replacement, weighted by popularity.
    scores_NTE = popularity_E - (-uniform_NTE.log()).log()
    return _weighted(scores_NTE.topk(case.topk, dim=-1).indices, generator)


def _weighted(topk_idx_NTK: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    weights_NTK = torch.rand(topk_idx_NTK.shape, generator=generator) + 0.1
    return topk_idx_NTK, weights_NTK / weights_NTK.sum(-1, keepdim=True)


def exchanges(op: str, dtype: str, grad_dtype: str = "bf16") -> list[tuple[str, bool]]:
    """What an operation sends, in order: (dtype of the rows, whether a weight travels with each pair)."""
    forward = {"dispatch": [(dtype, True)], "combine": [("bf16", False)]}
    if op != BACKWARD:
        return forward[op]
    return [*forward["dispatch"], *forward["combine"], (grad_dtype, False), ("bf16", True)]


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
        """The busiest rank's pairs as BF16 rows, also those of its own experts, if nothing is saved."""
        sent, received = self.pairs_NN.sum(1).max(), self.pairs_NN.sum(0).max()
        return int(max(sent, received)) * self.case.row_bytes

    def capacity_rows(self) -> int:
        """Rows that a rank reserves before it knows how many arrive: those of the fullest rank, and slack."""
        fullest = int(self.pairs_NN.sum(0).max())
        return math.ceil(fullest * CAPACITY_SLACK / CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE

    def pair_wire(self, op: str) -> tuple[int, int]:
        """(wire bytes, the part between domains) of an all-to-all of permuted rows: a BF16 row per pair."""
        moved = [
            self.pairs_NN * (self.case.row_bytes + VALUE_BYTES * weighted)
            for _, weighted in exchanges(op, "bf16")
        ]
        return self._busiest(moved)

    def row_wire(self, op: str, grad_dtype: str = "bf16") -> tuple[int, int]:
        """(wire bytes, the part between domains) of `uccl_ep`: a row once per rank, and once per domain."""
        sent = exchanges(op, self.case.dtype, grad_dtype)
        return self._busiest([self._rows_moved(*exchange) for exchange in sent])

    def _rows_moved(self, dtype: str, weighted: bool) -> Tensor:
        """Bytes from rank to rank, [N, N]. Combine takes the same paths back."""
        topology = self.case.topology
        row, value = self.case.wire_row_bytes(dtype), VALUE_BYTES * weighted
        hop_NN = self.rows_NN * row + self.pairs_NN * value
        moved_NN = torch.zeros_like(hop_NN)
        for src in range(self.case.ranks):
            for d, members in enumerate(topology.members):
                holder = src if d == topology.domain_of[src] else topology.rail(src, d)
                if holder != src:
                    pairs = self.pairs_NN[src, list(members)].sum()
                    moved_NN[src, holder] += self.rows_ND[src, d] * row + pairs * value
                for dst in members:
                    moved_NN[holder, dst] += hop_NN[src, dst]
        return moved_NN

    def least_copies(self, op: str, rank: int) -> dict[str, int]:
        """The least bytes that `rank` must write in `uccl_ep`, by destination."""
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

    def _busiest(self, exchanges_NN: list[Tensor]) -> tuple[int, int]:
        """Bytes into or out of the busiest rank, summed over exchanges: all, and those between domains."""
        crosses_NN = self._domain_of_N[:, None] != self._domain_of_N[None, :]
        wire = [moved_NN.masked_fill(self._own_NN, 0) for moved_NN in exchanges_NN]
        link = [moved_NN.masked_fill(~crosses_NN, 0) for moved_NN in exchanges_NN]
        return _sum_of_largest(wire), _sum_of_largest(link)


def _sum_of_largest(exchanges_NN: list[Tensor]) -> int:
    return sum(int(max(m.sum(0).max(), m.sum(1).max())) for m in exchanges_NN)
