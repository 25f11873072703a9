"""paired_gpu: a narrow DeepSeek-V3, 0.2 B parameters, experts in FP8, to compare dispatchers on two GPUs."""

from __future__ import annotations

from dataclasses import replace

from recipes.models.architecture import Latent
from recipes.models.dsv3_proxy import dsv3_proxy_4xh200
from recipes.models.recipe import Recipe


def paired_gpu() -> Recipe:
    """dsv3_proxy_4xh200 on half its GPUs, a seventh as wide, with a quarter of its experts: for `quality`.

    Its loss falls fastest in steps 60 to 180. Runs of one dispatcher differ in that by a few steps, which
    makes up to 1 % of the loss. Runs that begin together after that (`--branch-at 200`) do not show it.
    """
    proxy = dsv3_proxy_4xh200()
    return replace(
        proxy,
        name="paired_gpu",
        hardware="",
        num_ranks=2,
        domain_size=2,
        model=replace(
            proxy.model,
            hidden_size=1024,
            dense_ffn_size=2560,
            num_heads=8,
            latent=Latent(q_rank=384, kv_rank=256, nope_dim=128, rope_dim=64, value_dim=128),
            num_experts=64,
            expert_ffn_size=512,
            shared_ffn_size=512,
            init_std=0.02,
        ),
        distributed_optimizer=False,  # because the recipe writes checkpoints
        optimizer_bytes=12,
        sequence_length=1024,
        micro_batch_size=8,
        num_steps=500,
        lr=1e-4,
        min_lr=1e-6,
        warmup_steps=30,
        weight_decay=0.01,
        budget_bytes=512 << 20,
        val_interval=100,
        val_batches=4,
    )
