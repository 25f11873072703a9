"""paired_gpu: a narrow DeepSeek-V3, 0.2 B parameters, experts in FP8, to compare dispatchers on two GPUs."""

from __future__ import annotations

from dataclasses import replace

from recipes.architecture import Latent
from recipes.deepseek_v3 import deepseek_v3
from recipes.settings import Recipe


def paired_gpu() -> Recipe:
    """DeepSeek-V3's kinds of layer, top-k and precision, for `recipes.quality`; its text is bytes.

    Its loss falls fastest in steps 60 to 180, a few earlier or later from run to run of one dispatcher, which
    makes up to 1 %; runs that begin together after that (`--branch-at 200`) do not show it.
    """
    return Recipe(
        name="paired_gpu",
        device="cuda",
        num_ranks=2,
        domain_size=2,
        threads_per_rank=4,
        model=replace(
            deepseek_v3().model,
            num_layers=3,
            first_dense_layers=1,
            hidden_size=1024,
            dense_ffn_size=2560,
            num_heads=8,
            latent=Latent(q_rank=384, kv_rank=256, nope_dim=128, rope_dim=64, value_dim=128),
            num_experts=64,
            expert_ffn_size=512,
            shared_ffn_size=512,
            init_std=0.02,
            vocab_size=272,
            tied_embeddings=True,
            mtp_layers=0,
            tokenizer="",
        ),
        transformer_engine=True,
        fp8_recipe="blockwise",
        sequence_length=1024,
        micro_batch_size=8,
        num_microbatches=1,
        num_steps=500,
        lr=1e-4,
        min_lr=1e-6,
        warmup_steps=30,
        adam_beta2=0.95,
        weight_decay=0.01,
        clip_grad=1.0,
        seed=1234,
        token_dispatcher="uccl_ep",
        dispatch_dtype="fp8",
        grad_dtype="bf16",
        budget_bytes=512 << 20,
        ablate="none",
        val_interval=100,
        val_batches=4,
        checkpoint_interval=0,
        val_fraction=0.05,
    )
