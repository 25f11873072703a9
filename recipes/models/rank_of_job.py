"""A rank of a real job, on two GPUs: full-size layers, as many experts and rows as in a large group."""

from __future__ import annotations

import dataclasses

from recipes.models.architecture import Model
from recipes.models.deepseek_v3 import deepseek_v3
from recipes.models.dsv3_proxy import dsv3_proxy_4xh200
from recipes.models.qwen3 import qwen3_235b_a22b
from recipes.models.recipe import Recipe


def deepseek_v3_rank() -> Recipe:
    """Two MoE layers of DeepSeek-V3 with 4 experts a rank, as 64 ranks have; 32,768 rows a rank and layer."""
    return _rank("deepseek_v3_rank", deepseek_v3().model, num_experts=8, topk=4, passes=(2, 4))


def qwen3_235b_rank() -> Recipe:
    """Two MoE layers of Qwen3-235B-A22B, 8 experts a rank, as 16 ranks have; 32,768 rows a rank and layer."""
    return _rank("qwen3_235b_rank", qwen3_235b_a22b().model, num_experts=16, topk=2, passes=(4, 8))


def _rank(name: str, model: Model, *, num_experts: int, topk: int, passes: tuple[int, int]) -> Recipe:
    """passes: sequences of 4096 tokens in a forward pass, and forward passes of a step."""
    micro_batch_size, num_microbatches = passes
    return dataclasses.replace(
        dsv3_proxy_4xh200(),
        name=name,
        hardware="h100",
        num_ranks=2,
        domain_size=2,
        model=dataclasses.replace(
            model,
            num_layers=2,
            first_dense_layers=0,
            num_experts=num_experts,
            topk=topk,
            router=dataclasses.replace(model.router, num_groups=None, group_topk=None),
            vocab_size=272,
            tied_embeddings=True,
            mtp_layers=0,
            tokenizer="",
        ),
        fp8_recipe=None,
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
    )
