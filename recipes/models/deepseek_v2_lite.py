"""DeepSeek-V2-Lite (arXiv:2405.04434): 15.7 B parameters, 2.4 B active."""

from __future__ import annotations

from recipes.models.architecture import Latent, Model, Router, Yarn
from recipes.models.layout import Layout, Pretraining, Schedule

_MODEL = Model(
    num_layers=27,
    first_dense_layers=1,
    hidden_size=2048,
    dense_ffn_size=10944,
    num_heads=16,
    latent=Latent(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    qk_norm=True,
    yarn=Yarn(factor=40, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
    activation="swiglu",
    norm_epsilon=1e-6,
    init_std=0.006,
    vocab_size=102400,
    tied_embeddings=False,
    num_experts=64,
    topk=6,
    expert_ffn_size=1408,
    shared_ffn_size=2816,
    router=Router(pre_softmax=True, scaling_factor=1.0, balancing="seq_aux_loss"),
    aux_loss_coeff=1e-3,
    tokenizer="deepseek-ai/DeepSeek-V2-Lite",
)
_LAYOUTS = {
    "h100": Layout(
        num_ranks=8,
        ep=8,
        global_batch_size=512,
        fp8_recipe="blockwise",
        recompute=("mla_up_proj", "layernorm"),
    ),
    "h200": Layout(num_ranks=8, ep=8, global_batch_size=512, micro_batch_size=2, fp8_recipe="blockwise"),
    "b200": Layout(num_ranks=8, ep=8, global_batch_size=512, micro_batch_size=2, fp8_recipe="mxfp8"),
    "mi300x": Layout(num_ranks=8, ep=8, global_batch_size=512, micro_batch_size=2),
}


def deepseek_v2_lite() -> Pretraining:
    """One node. 64 experts and 2 shared ones; queries are not compressed.

    With Megatron-Core 0.19 and TransformerEngine the projection of queries has its own norm, 2048 weights a
    layer. The published model and Megatron-Core 0.16 do not have it.
    """
    return Pretraining(
        name="deepseek_v2_lite",
        model=_MODEL,
        layouts=_LAYOUTS,
        schedule=Schedule(num_steps=500_000, warmup_steps=2000, lr=4.2e-4, min_lr=4.2e-5),
    )
