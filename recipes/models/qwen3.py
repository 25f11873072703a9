"""Qwen3-30B-A3B and Qwen3-235B-A22B (arXiv:2505.09388)."""

from __future__ import annotations

from recipes.models.architecture import Model, Router
from recipes.models.layout import Layout, Pretraining, Schedule

_MOE = ("moe", "layernorm")

_QWEN3_30B_A3B_MODEL = Model(
    num_layers=48,
    hidden_size=2048,
    dense_ffn_size=6144,
    num_heads=32,
    num_query_groups=4,
    head_dim=128,
    qk_norm=True,
    rope_theta=1_000_000,
    activation="swiglu",
    norm_epsilon=1e-6,
    vocab_size=151936,
    tied_embeddings=False,
    num_experts=128,
    topk=8,
    expert_ffn_size=768,
    router=Router(balancing="aux_loss"),
    aux_loss_coeff=1e-3,
    tokenizer="Qwen/Qwen3-30B-A3B",
)
_QWEN3_30B_A3B_LAYOUTS = {
    "h100": Layout(num_ranks=16, pp=2, ep=8, global_batch_size=512, fp8_recipe="blockwise", recompute=_MOE),
    "h200": Layout(num_ranks=8, ep=8, global_batch_size=512, fp8_recipe="blockwise", recompute=_MOE),
    "b200": Layout(num_ranks=8, ep=8, global_batch_size=512, fp8_recipe="mxfp8", recompute=("layernorm",)),
    "mi300x": Layout(num_ranks=8, ep=8, global_batch_size=512, recompute=("layernorm",)),
}

_QWEN3_235B_A22B_MODEL = Model(
    num_layers=94,
    hidden_size=4096,
    dense_ffn_size=12288,
    num_heads=64,
    num_query_groups=4,
    head_dim=128,
    qk_norm=True,
    rope_theta=1_000_000,
    activation="swiglu",
    norm_epsilon=1e-6,
    vocab_size=151936,
    tied_embeddings=False,
    num_experts=128,
    topk=8,
    expert_ffn_size=1536,
    router=Router(balancing="aux_loss"),
    aux_loss_coeff=1e-3,
    tokenizer="Qwen/Qwen3-235B-A22B",
)
_QWEN3_235B_A22B_LAYOUTS = {
    "h100": Layout(
        num_ranks=256,
        pp=8,
        last_stage_layers=10,
        ep=32,
        global_batch_size=4096,
        fp8_recipe="blockwise",
        recompute=_MOE,
    ),
    "h200": Layout(
        num_ranks=128,
        pp=8,
        last_stage_layers=10,
        ep=16,
        global_batch_size=4096,
        fp8_recipe="blockwise",
        recompute=_MOE,
    ),
    "b200": Layout(
        num_ranks=64,
        pp=8,
        last_stage_layers=10,
        ep=8,
        global_batch_size=4096,
        fp8_recipe="mxfp8",
        recompute=_MOE,
    ),
    "mi300x": Layout(
        num_ranks=64,
        pp=8,
        last_stage_layers=10,
        ep=8,
        global_batch_size=4096,
        recompute=_MOE,
    ),
}


def qwen3_30b_a3b() -> Pretraining:
    """One node. 128 small experts: rows of 2048, the least that a dispatch has to carry here."""
    return Pretraining(
        name="qwen3_30b_a3b",
        model=_QWEN3_30B_A3B_MODEL,
        layouts=_QWEN3_30B_A3B_LAYOUTS,
        schedule=Schedule(num_steps=500_000, warmup_steps=2000, lr=3e-4, min_lr=3e-5),
    )


def qwen3_235b_a22b() -> Pretraining:
    """94 layers in 8 stages of 12 and 10. No shared expert, no group limit."""
    return Pretraining(
        name="qwen3_235b_a22b",
        model=_QWEN3_235B_A22B_MODEL,
        layouts=_QWEN3_235B_A22B_LAYOUTS,
        schedule=Schedule(num_steps=500_000, warmup_steps=2000, lr=2e-4, min_lr=2e-5),
    )
