"""Builds the recipe's GPT-MoE, its data parallel wrapper, optimizer and schedule from Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from recipes import devices
from recipes.settings import PADDED_VOCAB_SIZE, Recipe


@dataclass(frozen=True)
class Training:
    """What a training loop needs; `model` is the data parallel wrapper."""

    model: Any
    config: TransformerConfig
    optimizer: Any
    scheduler: Any

    def moe_layers(self) -> Iterator[MoELayer]:
        return (m for m in self.model.modules() if isinstance(m, MoELayer))

    def num_parameters(self) -> int:
        """Of the whole model: the experts of this rank times their number of owners, the rest once."""
        owners = parallel_state.get_expert_model_parallel_world_size()
        named = self.model.module.named_parameters()
        return sum(p.numel() * (owners if ".experts." in name else 1) for name, p in named)


def transformer_config(recipe: Recipe, carrier: dict[str, Any]) -> TransformerConfig:
    """`carrier` holds the dispatcher's keyword arguments (from `uccl_ep_train.megatron.enable` or stock)."""
    return TransformerConfig(
        num_layers=recipe.num_layers,
        hidden_size=recipe.hidden_size,
        num_attention_heads=recipe.num_heads,
        ffn_hidden_size=recipe.expert_ffn_size,
        moe_ffn_hidden_size=recipe.expert_ffn_size,
        num_moe_experts=recipe.num_experts,
        moe_router_topk=recipe.topk,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=recipe.aux_loss_coeff,
        expert_model_parallel_size=recipe.num_ranks,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        deterministic_mode=recipe.device == "cuda",  # a resumed run repeats the bits of one left alone
        use_cpu_initialization=True,  # for GPUs, too: nothing has to be known of their generators
        # The fused kernels need a GPU and more packages; the local spec has a plain torch path for each.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **carrier,
    )


def build(recipe: Recipe, carrier: dict[str, Any]) -> Training:
    """Collective. The same seed gives the same weights whatever the dispatcher."""
    model_parallel_cuda_manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    config = transformer_config(recipe, carrier)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=recipe.num_experts, moe_grouped_gemm=False, normalization="RMSNorm"
        ),
        vocab_size=PADDED_VOCAB_SIZE,
        max_sequence_length=recipe.sequence_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    ).to(devices.own())
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, gpt))
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=recipe.lr,
            min_lr=recipe.min_lr,
            adam_beta2=recipe.adam_beta2,
            weight_decay=recipe.weight_decay,
            clip_grad=recipe.clip_grad,
            bf16=True,
            params_dtype=torch.bfloat16,
        ),
        [model],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.lr,
        min_lr=recipe.min_lr,
        lr_warmup_steps=min(recipe.warmup_steps, recipe.num_steps // 4),  # short trial runs
        lr_decay_steps=recipe.num_steps,
        lr_decay_style="cosine",
        start_wd=recipe.weight_decay,
        end_wd=recipe.weight_decay,
        wd_incr_steps=recipe.num_steps,
        wd_incr_style="constant",
    )
    return Training(model, config, optimizer, scheduler)
