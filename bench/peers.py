"""The peers: Megatron-Core's own all-to-all dispatcher, and the bare all-to-all of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import BACKWARD, OPS, Case, Traffic
from bench.systems import Sample, System


class MegatronAllToAll(System):
    """The stock path: permute, all-to-all, sort by expert, and back, as an MoE layer calls it.

    Its input is what Megatron's router returns, routing_map [T, E] and probs [T, E]. Making these from the
    top-k is not timed. Its permutation is fused if there is a GPU and TransformerEngine is installed.
    """

    name = "megatron_alltoall"

    def __init__(self, case: Case, *, backward: bool) -> None:
        from uccl_ep_train.megatron import cpu_shims

        cpu_shims.install()  # before Megatron is imported; does nothing if there is a GPU
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.fused = torch.cuda.is_available() and bool(moe_utils.HAVE_TE)
        alone, _ = dist.new_subgroups(group_size=1)
        world = dist.group.WORLD
        config = TransformerConfig(
            num_layers=1,
            hidden_size=case.hidden,
            num_attention_heads=1,
            num_moe_experts=case.experts,
            moe_router_topk=case.topk,
            moe_router_dtype="fp32",
            moe_token_dispatcher_type="alltoall",
            moe_permute_fusion=self.fused,
            expert_model_parallel_size=case.ranks,
            add_bias_linear=False,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=True,
        )
        num_local = case.experts // case.ranks
        first = dist.get_rank() * num_local
        self._dispatcher = MoEAlltoAllTokenDispatcher(
            num_local,
            list(range(first, first + num_local)),
            config,
            ProcessGroupCollection(ep=world, expt_tp=alone, tp_ep=world),
        )
        if backward:
            self.ops = (*OPS, BACKWARD)
        self._experts = case.experts
        self._routed: tuple[Tensor, Tensor, Tensor] | None = None
        self._rows: Tensor | None = None
        self._out: Tensor | None = None
        self._leaf: Tensor | None = None

    def bind(self, sample: Sample) -> None:
        shape = (len(sample.x), self._experts)
        weights_TK = sample.topk_weights
        probs_TE = weights_TK.new_zeros(shape).scatter_(1, sample.topk_idx, weights_TK)
        map_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter_(1, sample.topk_idx, True)
        self._routed = (sample.x, map_TE, probs_TE)
        self._rows = self._out = self._leaf = None

    def run(self, op: str) -> None:
        assert self._routed is not None
        x, map_TE, probs_TE = self._routed
        if op == "dispatch":
            self._rows, _ = self._dispatch(x, map_TE, probs_TE)
        elif op == "combine":
            self._out = self._combine(self._rows)
        else:
            self._leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                rows, probs = self._dispatch(self._leaf, map_TE, probs_TE.detach().requires_grad_())
                out = self._combine(rows)
                torch.autograd.backward([out, probs], [x, torch.ones_like(probs)])

    def _dispatch(self, x: Tensor, map_TE: Tensor, probs_TE: Tensor) -> Any:
        stages = self._dispatcher
        hidden, probs = stages.dispatch_preprocess(x, map_TE, probs_TE)
        hidden, probs = stages.token_dispatch(hidden, probs)
        rows, _, row_probs = stages.dispatch_postprocess(hidden, probs)
        return rows, row_probs

    def _combine(self, rows: Any) -> Any:
        stages = self._dispatcher
        return stages.combine_postprocess(stages.token_combine(stages.combine_preprocess(rows)))

    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        return traffic.pair_wire(op)

    def results(self) -> dict[str, Tensor]:
        assert self._rows is not None and self._out is not None
        found = {"rows": self._rows, "output": self._out}
        if self._leaf is not None and self._leaf.grad is not None:
            found["gradient"] = self._leaf.grad
        return found


class BareAllToAll(System):
    """`all_to_all_single` of permuted rows with known splits, and back.

    No dispatcher over this library can take less time: it has no metadata, no permutation and no sums.
    """

    layout = "rank_major"
    end_to_end = False

    def __init__(self, case: Case) -> None:
        self.name = f"{self.collectives()}_all_to_all"
        self._hidden = case.hidden
        self._splits: tuple[list[int], list[int]] = ([], [])
        self._sent: Tensor | None = None
        self._received: Tensor | None = None

    @staticmethod
    def collectives() -> str:
        return "nccl" if torch.cuda.is_available() else "gloo"

    def bind(self, sample: Sample) -> None:
        pairs_NN, rank = sample.traffic.pairs_NN, dist.get_rank()
        self._splits = (pairs_NN[rank].tolist(), pairs_NN[:, rank].tolist())
        by_expert = sample.topk_idx.flatten().argsort(stable=True)
        self._sent = sample.x.repeat_interleave(sample.topk_idx.shape[1], 0)[by_expert]
        self._received = None

    def run(self, op: str) -> None:
        sent, received = self._splits
        if op == "dispatch":
            assert self._sent is not None
            self._received = _exchange(self._sent, received, sent, self._hidden)
        else:
            assert self._received is not None
            _exchange(self._received, sent, received, self._hidden)

    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        return traffic.pair_wire("combine")  # no weights travel


def _exchange(rows: Tensor, receive: list[int], send: list[int], hidden: int) -> Tensor:
    out = rows.new_empty(sum(receive), hidden)
    dist.all_to_all_single(out, rows, receive, send)
    return out


def about_stock(system: Any) -> str:
    """One line below the table: which optional parts the stock path had."""
    fused = "with" if getattr(system, "fused", False) else "without"
    reason = "" if fused == "with" else " (TransformerEngine is not installed, or there is no GPU)"
    return f"megatron_alltoall ran over {BareAllToAll.collectives()}, {fused} fused permutation{reason}"
