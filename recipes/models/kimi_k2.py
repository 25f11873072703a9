"""Kimi-K2 (arXiv:2507.20534): 1.04 T parameters, 32 B active."""

from __future__ import annotations

from recipes.models.architecture import Latent, Model, Router, Yarn
from recipes.models.layout import FULL, Layout, Pretraining, Schedule

_KEEP_LITTLE = ("moe", "mla_up_proj", "layernorm", "mlp")

_MODEL = Model(
    num_layers=61,
    first_dense_layers=1,
    hidden_size=7168,
    dense_ffn_size=18432,
    num_heads=64,
    latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    qk_norm=True,
    rope_theta=50000,
    yarn=Yarn(factor=32, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
    activation="swiglu",
    norm_epsilon=1e-6,
    init_std=0.006,
    vocab_size=163840,
    tied_embeddings=False,
    num_experts=384,
    topk=8,
    expert_ffn_size=2048,
    shared_ffn_size=2048,
    router=Router(score="sigmoid", scaling_factor=2.827, expert_bias=True, balancing="seq_aux_loss"),
    aux_loss_coeff=1e-4,
    tokenizer="moonshotai/Kimi-K2-Base",
)
_LAYOUTS = {
    "h100": Layout(
        num_ranks=1024,
        pp=16,
        last_stage_layers=1,
        ep=64,
        global_batch_size=16384,
        fp8_recipe="blockwise",
        recompute=_KEEP_LITTLE,
    ),
    "h200": Layout(
        num_ranks=512,
        pp=8,
        last_stage_layers=5,
        ep=64,
        global_batch_size=16384,
        fp8_recipe="blockwise",
        recompute=_KEEP_LITTLE,
    ),
    "b200": Layout(
        num_ranks=256,
        pp=4,
        last_stage_layers=13,
        ep=64,
        global_batch_size=16384,
        fp8_recipe="mxfp8",
        recompute=_KEEP_LITTLE,
    ),
    "mi300x": Layout(
        num_ranks=256,
        pp=4,
        last_stage_layers=13,
        ep=64,
        global_batch_size=16384,
        recompute=FULL,
    ),
}


def kimi_k2() -> Pretraining:
    """384 experts, any 8 of them: no group limit, so a token goes to 5 of 8 nodes."""
    return Pretraining(
        name="kimi_k2",
        model=_MODEL,
        layouts=_LAYOUTS,
        schedule=Schedule(num_steps=230_000, warmup_steps=500, lr=2e-4, min_lr=2e-5),
    )
