"""Mixtral-8x7B (arXiv:2401.04088): 46.7 B parameters, 12.9 B active."""

from __future__ import annotations

from recipes.models.architecture import Model
from recipes.models.layout import Layout, Pretraining, Schedule

_MODEL = Model(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_query_groups=8,
    head_dim=128,
    rope_theta=1_000_000,
    activation="swiglu",
    vocab_size=32000,
    tied_embeddings=False,
    num_experts=8,
    topk=2,
    expert_ffn_size=14336,
    aux_loss_coeff=1e-2,
    tokenizer="mistralai/Mixtral-8x7B-v0.1",
)
_LAYOUTS = {
    "h100": Layout(
        num_ranks=32,
        pp=4,
        ep=8,
        global_batch_size=512,
        fp8_recipe="blockwise",
        recompute=("moe_act", "layernorm"),
    ),
    "h200": Layout(
        num_ranks=16,
        pp=2,
        ep=8,
        global_batch_size=512,
        fp8_recipe="blockwise",
        recompute=("moe_act", "layernorm"),
    ),
    "b200": Layout(num_ranks=16, pp=2, ep=8, global_batch_size=512, fp8_recipe="mxfp8"),
    "mi300x": Layout(num_ranks=16, pp=2, ep=8, global_batch_size=512),
}


def mixtral_8x7b() -> Pretraining:
    """8 large experts, top-2: an expert per GPU of a node, dispatch inside the node only."""
    return Pretraining(
        name="mixtral_8x7b",
        model=_MODEL,
        layouts=_LAYOUTS,
        schedule=Schedule(num_steps=500_000, warmup_steps=500, lr=1e-4, min_lr=1e-5),
    )
