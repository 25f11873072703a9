"""dsv3_proxy_4xh200: three layers of DeepSeek-V3 on four H200, one rank each."""

from __future__ import annotations

import dataclasses

from recipes.models.deepseek_v3 import deepseek_v3
from recipes.models.recipe import Recipe


def dsv3_proxy_4xh200() -> Recipe:
    """One dense and two MoE layers: a third MoE layer would need 42 GiB more.

    Sizes of a layer, routing and precision are DeepSeek-V3's; text and vocabulary are bytes.
    """
    return Recipe(
        name="dsv3_proxy_4xh200",
        hardware="h200",
        device="cuda",
        num_ranks=4,
        domain_size=4,
        threads_per_rank=4,
        model=dataclasses.replace(
            deepseek_v3().model,
            num_layers=3,
            first_dense_layers=1,
            vocab_size=272,
            tied_embeddings=True,
            mtp_layers=0,
            tokenizer="",
        ),
        transformer_engine=True,
        fp8_recipe="blockwise",
        distributed_optimizer=True,
        optimizer_bytes=8,  # as DeepSeek-V3 was trained
        sequence_length=4096,
        micro_batch_size=1,
        num_microbatches=1,
        num_steps=100,
        lr=2.2e-4,
        min_lr=2.2e-5,
        warmup_steps=10,
        adam_beta2=0.95,
        weight_decay=0.1,
        clip_grad=1.0,
        seed=1234,
        token_dispatcher="uccl_ep",
        dispatch_dtype="fp8",
        grad_dtype="bf16",
        budget_bytes=1 << 30,
        ablate="none",
        val_interval=50,
        val_batches=2,
        checkpoint_interval=0,  # it would be 400 GB
        val_fraction=0.05,
    )
