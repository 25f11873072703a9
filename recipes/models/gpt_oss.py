"""GPT-OSS-120B (arXiv:2508.10925): 117 B parameters, 5.1 B active."""

from __future__ import annotations

from recipes.models.architecture import Model, Yarn
from recipes.models.layout import Layout, Pretraining, Schedule

_MODEL = Model(
    num_layers=36,
    hidden_size=2880,
    num_heads=64,
    num_query_groups=8,
    head_dim=64,
    window=128,
    sinks=True,
    rope_theta=150000,
    yarn=Yarn(factor=32, original_length=4096),
    activation="quick_geglu",
    glu_clamp=7.0,
    glu_offset=1.0,
    bias=True,
    vocab_size=201088,
    tied_embeddings=False,
    num_experts=128,
    topk=4,
    expert_ffn_size=2880,
    aux_loss_coeff=1e-3,
    tokenizer="openai/gpt-oss-120b",
)
_LAYOUTS = {
    "h100": Layout(num_ranks=64, pp=4, ep=16, global_batch_size=1024, recompute=("moe", "layernorm")),
    "h200": Layout(num_ranks=32, pp=4, ep=8, global_batch_size=1024, recompute=("moe", "layernorm")),
    "b200": Layout(num_ranks=32, pp=4, ep=8, global_batch_size=1024, recompute=("layernorm",)),
    "mi300x": Layout(num_ranks=32, pp=4, ep=8, global_batch_size=1024, recompute=("layernorm",)),
}


def gpt_oss_120b() -> Pretraining:
    """Attention sinks, a window of 128 in every second layer, biases everywhere, clamped gated experts.

    Trained and dispatched in BF16: TransformerEngine's blocks of 128 do not divide 2880.
    """
    return Pretraining(
        name="gpt_oss_120b",
        model=_MODEL,
        layouts=_LAYOUTS,
        schedule=Schedule(num_steps=500_000, warmup_steps=2000, lr=2e-4, min_lr=2e-5),
        dispatch_dtype="bf16",
    )
