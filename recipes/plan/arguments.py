"""Turns models and layouts into arguments of Megatron-LM, and these into Megatron-Core's TransformerConfig.

Arguments are kept as a dict by Megatron-LM's own names: {"num_layers": 61, "swiglu": True}. False and None
mean that the argument is not given.
"""

from __future__ import annotations

from typing import Any

from recipes.models.architecture import Model
from recipes.models.layout import FULL, Layout, Schedule

Arguments = dict[str, Any]

DISPATCHERS: dict[str, Arguments] = {
    "uccl_ep": {"moe_token_dispatcher_type": "uccl_ep"},
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "flex-deepep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    "flex-hybridep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
}
"""What selects a dispatcher. uccl_ep is a name that the plug-in adds."""

EVAL_INTERVAL = 1000
"""Steps. Megatron-LM (0.16 to 0.20) has no default, and ends with an error where none is given."""

# Where Megatron-LM and TransformerConfig call the same thing differently.
_CONFIG_NAMES = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp8_format": "fp8",
}
# Arguments of the model or of the training program, not of TransformerConfig.
_NOT_CONFIG = {
    "adam_beta1", "adam_beta2", "clip_grad", "disable_bias_linear", "eval_interval", "eval_iters",
    "exp_avg_dtype", "exp_avg_sq_dtype", "global_batch_size", "group_query_attention", "log_interval",
    "log_throughput", "lr", "lr_decay_style", "lr_warmup_iters", "make_vocab_size_divisible_by",
    "max_position_embeddings", "micro_batch_size", "min_lr", "mock_data", "no_bias_dropout_fusion",
    "no_yarn_correction_range_round_to_int", "position_embedding_type", "seed", "seq_length", "split",
    "tokenizer_model", "tokenizer_type", "train_iters", "untie_embeddings_and_output_weights",
    "use_distributed_optimizer", "use_precision_aware_optimizer", "vocab_size", "weight_decay",
    "yarn_original_max_position_embeddings",
}  # fmt: skip
_MLA_CONFIG = {"rotary_base", "rotary_scaling_factor", "mscale", "mscale_all_dim"}
_ACTIVATIONS: dict[str, Arguments] = {
    "gelu": {},
    "swiglu": {"swiglu": True},
    "quick_geglu": {"quick_geglu": True},
}


def model_arguments(model: Model) -> Arguments:
    """The arguments for the architecture."""
    router = model.router
    dense = model.first_dense_layers
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.dense_ffn_size or model.expert_ffn_size,
        "num_attention_heads": model.num_heads,
        "normalization": "RMSNorm",
        "norm_epsilon": model.norm_epsilon,
        "init_method_std": model.init_std,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "disable_bias_linear": not model.bias,
        # The fused addition of bias and residual cannot add the bias of an expert.
        "no_bias_dropout_fusion": model.bias,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        **_ACTIVATIONS[model.activation],
        "glu_linear_offset": model.glu_offset or None,
        "activation_func_clamp_value": model.glu_clamp,
        **_attention_arguments(model),
        "num_experts": model.num_experts,
        "moe_layer_freq": [0] * dense + [1] * model.num_moe_layers if dense else None,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_shared_expert_intermediate_size": model.shared_ffn_size,
        "moe_router_topk": model.topk,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": router.balancing,
        "moe_aux_loss_coeff": model.aux_loss_coeff,
        "moe_router_score_function": router.score,
        "moe_router_pre_softmax": router.pre_softmax,
        "moe_router_num_groups": router.num_groups,
        "moe_router_group_topk": router.group_topk,
        "moe_router_topk_scaling_factor": router.scaling_factor,
        "moe_router_enable_expert_bias": router.expert_bias,
        "mtp_num_layers": model.mtp_layers or None,
    }


def _attention_arguments(model: Model) -> Arguments:
    yarn, latent = model.yarn, model.latent
    found: Arguments = {
        "position_embedding_type": "rope",
        "rotary_base": model.rope_theta,
        "qk_layernorm": model.qk_norm,
        "kv_channels": model.head_dim,
        "softmax_type": "learnable" if model.sinks else None,
        # Megatron counts the tokens before a token, and skips the window in every n-th layer.
        "window_size": (model.window - 1, 0) if model.window else None,
        "window_attn_skip_freq": 2 if model.window else None,
    }
    if yarn:
        found |= {
            "rotary_scaling_factor": yarn.factor,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    if latent:
        # Latent attention always stretches positions: its rope_type is yarn.
        return found | {
            "multi_latent_attention": True,
            "kv_channels": latent.nope_dim,
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
        }
    if yarn:
        found |= {
            "position_embedding_type": "yarn",
            "yarn_original_max_position_embeddings": yarn.original_length,
            "no_yarn_correction_range_round_to_int": True,
        }
    return found | {
        "group_query_attention": model.num_query_groups is not None,
        "num_query_groups": model.num_query_groups,
    }


def layout_arguments(layout: Layout) -> Arguments:
    """The arguments for how a model is spread over the ranks, and how precisely it is computed."""
    full = layout.recompute == FULL
    small_moments = layout.optimizer_bytes == 8
    return {
        "pipeline_model_parallel_size": layout.pp,
        "decoder_last_pipeline_num_layers": layout.last_stage_layers,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
        "seq_length": layout.sequence_length,
        "max_position_embeddings": layout.sequence_length,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": layout.global_batch_size,
        "bf16": True,
        "fp8_format": "e4m3" if layout.fp8_recipe else None,
        "fp8_recipe": layout.fp8_recipe,
        "moe_grouped_gemm": True,
        "recompute_granularity": ("full" if full else "selective") if layout.recompute else None,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
        "recompute_modules": list(layout.recompute) if layout.recompute and not full else None,
        "use_distributed_optimizer": layout.distributed_optimizer,
        "use_precision_aware_optimizer": small_moments,
        "exp_avg_dtype": "bf16" if small_moments else None,
        "exp_avg_sq_dtype": "bf16" if small_moments else None,
    }


def schedule_arguments(schedule: Schedule) -> Arguments:
    """The arguments for steps, learning rate and optimizer."""
    return {
        "train_iters": schedule.num_steps,
        "lr": schedule.lr,
        "min_lr": schedule.min_lr,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": schedule.warmup_steps,
        "adam_beta1": 0.9,
        "adam_beta2": schedule.adam_beta2,
        "weight_decay": schedule.weight_decay,
        "clip_grad": schedule.clip_grad,
        "eval_interval": EVAL_INTERVAL,
    }


def command_line(arguments: Arguments) -> list[str]:
    """The arguments as words of a shell command: ["--num-layers", "61", "--swiglu"]."""
    words = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if name == "recompute_modules":
            words += value  # an option with several values
        elif isinstance(value, tuple):
            words.append(",".join(str(v) for v in value))
        else:
            words.append(str(value).replace(" ", ""))
    return words


def config_arguments(arguments: Arguments) -> Arguments:
    """Keyword arguments of TransformerConfig, or of MLATransformerConfig with multi_latent_attention.

    What is not given keeps TransformerConfig's default, as it does on Megatron-LM's command line.
    """
    import torch
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    latent = bool(arguments.get("multi_latent_attention"))
    given = {k: v for k, v in arguments.items() if v is not None and v is not False}
    found: Arguments = {}
    for name, value in given.items():
        if name == "swiglu":
            found |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
        elif name == "quick_geglu":
            found |= {"gated_linear_unit": True, "activation_func": quick_gelu}
        elif name == "bf16":
            found |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
        elif (
            name not in _NOT_CONFIG
            and not name.startswith("uccl_ep_")
            and (latent or name not in _MLA_CONFIG)
        ):
            found[_CONFIG_NAMES.get(name, name)] = value
    if latent and not given.get("q_lora_rank"):
        found["q_lora_rank"] = None  # TransformerConfig's default is a rank; Megatron-LM's is none
    return found | {"add_bias_linear": not arguments["disable_bias_linear"]}
