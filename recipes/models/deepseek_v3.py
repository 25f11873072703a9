"""DeepSeek-V3 (arXiv:2412.19437): 671 B parameters, 37 B active."""

from __future__ import annotations

from recipes.models.architecture import Latent, Model, Router, Yarn
from recipes.models.layout import FULL, Layout, Pretraining, Schedule

_KEEP_LITTLE = ("moe", "mla_up_proj", "layernorm", "mlp")

_MODEL = Model(
    num_layers=61,
    first_dense_layers=3,
    hidden_size=7168,
    dense_ffn_size=18432,
    num_heads=128,
    latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    qk_norm=True,
    yarn=Yarn(factor=40, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
    activation="swiglu",
    norm_epsilon=1e-6,
    init_std=0.006,
    vocab_size=129280,
    tied_embeddings=False,
    num_experts=256,
    topk=8,
    expert_ffn_size=2048,
    shared_ffn_size=2048,
    router=Router(
        score="sigmoid",
        num_groups=8,
        group_topk=4,
        scaling_factor=2.5,
        expert_bias=True,
        balancing="seq_aux_loss",
    ),
    aux_loss_coeff=1e-4,
    mtp_layers=1,
    tokenizer="deepseek-ai/DeepSeek-V3",
)
_LAYOUTS = {
    "h100": Layout(
        num_ranks=1024,
        pp=16,
        last_stage_layers=1,
        ep=64,
        global_batch_size=15360,
        fp8_recipe="blockwise",
        optimizer_bytes=8,
        recompute=_KEEP_LITTLE,
    ),
    "h200": Layout(
        num_ranks=512,
        pp=8,
        last_stage_layers=5,
        ep=64,
        global_batch_size=15360,
        fp8_recipe="blockwise",
        optimizer_bytes=8,
        recompute=_KEEP_LITTLE,
    ),
    "b200": Layout(
        num_ranks=256,
        pp=4,
        last_stage_layers=13,
        ep=64,
        global_batch_size=15360,
        fp8_recipe="mxfp8",
        optimizer_bytes=8,
        recompute=_KEEP_LITTLE,
    ),
    "mi300x": Layout(
        num_ranks=256,
        pp=4,
        last_stage_layers=13,
        ep=64,
        global_batch_size=15360,
        recompute=FULL,
    ),
}


def deepseek_v3() -> Pretraining:
    """256 experts in 8 groups, of which a token may go to 4: with 64 ranks a group is a node."""
    return Pretraining(
        name="deepseek_v3",
        model=_MODEL,
        layouts=_LAYOUTS,
        schedule=Schedule(num_steps=235_000, warmup_steps=2000, lr=2.2e-4, min_lr=2.2e-5),
    )
