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
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from recipes.models import attention
from recipes.models.recipe import Recipe
from recipes.plan import devices
from recipes.plan.arguments import config_arguments, model_arguments


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
        """Parameters of the whole model: the experts of this rank times their number of owners, the rest
        once."""
        owners = parallel_state.get_expert_model_parallel_world_size()
        named = self.model.module.named_parameters()
        return sum(p.numel() * (owners if ".experts." in name else 1) for name, p in named)


def transformer_config(recipe: Recipe, carrier: dict[str, Any]) -> TransformerConfig:
    """`carrier` holds the dispatcher's keyword arguments (from `uccl_ep_train.megatron.enable` or stock)."""
    te = uses_transformer_engine(recipe)
    kind = MLATransformerConfig if recipe.model.latent else TransformerConfig
    return kind(
        **config_arguments(model_arguments(recipe.model)),
        expert_model_parallel_size=recipe.num_ranks,
        attention_softmax_in_fp32=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        # A resumed run repeats the bits of an uninterrupted one. TransformerEngine would need an environment
        # variable.
        deterministic_mode=recipe.device == "cuda" and not te,
        use_cpu_initialization=not te,  # for GPUs, too, so that their generators do not matter
        # The fused kernels need a GPU and more packages; the local spec has a plain torch path for each.
        masked_softmax_fusion=False,
        bias_activation_fusion=te,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **(_transformer_engine_config(recipe) if te else {}),
        **({"transformer_impl": "local"} if recipe.model.latent and not te else {}),
        **carrier,
    )


def uses_transformer_engine(recipe: Recipe) -> bool:
    return recipe.transformer_engine and recipe.device == "cuda"


def _transformer_engine_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "transformer_impl": "transformer_engine",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": recipe.token_dispatcher != "uccl_ep",  # ours has nothing left to permute
        "fp8": "e4m3" if recipe.fp8_recipe else None,
        "fp8_recipe": recipe.fp8_recipe or "delayed",
    }


def _moments(recipe: Recipe) -> dict[str, Any]:
    """Moments in BF16, which only TransformerEngine's optimizer can keep."""
    if recipe.optimizer_bytes != 8 or not uses_transformer_engine(recipe):
        return {}
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    }


def _layer_spec(recipe: Recipe, config: TransformerConfig) -> Any:
    model = recipe.model
    if uses_transformer_engine(recipe):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    if model.latent or model.first_dense_layers:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        if model.latent:
            attention.use_in(spec, model.latent.q_rank)
        return spec
    # The same layers as those of a block spec, which brings another final norm if TransformerEngine is
    # installed.
    return get_gpt_layer_local_spec(
        num_experts=model.num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
    )


def build(recipe: Recipe, carrier: dict[str, Any]) -> Training:
    """Collective. The same seed gives the same weights whatever the dispatcher."""
    model_parallel_cuda_manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    config = transformer_config(recipe, carrier)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(recipe, config),
        vocab_size=recipe.model.vocab_size,
        max_sequence_length=recipe.sequence_length,
        position_embedding_type="rope",
        rotary_base=recipe.model.rope_theta,
        share_embeddings_and_output_weights=recipe.model.tied_embeddings,
    ).to(devices.own())
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=recipe.distributed_optimizer,
    )
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
            use_distributed_optimizer=recipe.distributed_optimizer,
            **_moments(recipe),
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
