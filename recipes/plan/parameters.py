"""Builds a model's pipeline stages by Megatron-Core, without memory or other ranks, and counts parameters.

The modules are Megatron's own on the meta device; the process groups are torch's fake ones, of as many
ranks as the layout has. Layers are those of Megatron's local spec: TransformerEngine, which a full-size run
uses, has the same parameters and needs a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recipes.models import attention
from recipes.models.architecture import Model
from recipes.models.layout import Layout
from recipes.plan.arguments import Arguments, config_arguments

# What the local spec has no module for; it changes no parameter.
_NEEDS_TE = {"fp8_format", "fp8_recipe", "moe_grouped_gemm", "moe_permute_fusion"}
_RECOMPUTE = {"recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"}
_ASSUMED_TE = "2.20.2"


class BuildError(RuntimeError):
    """Megatron-Core refuses the model."""


@dataclass(frozen=True)
class Stage:
    """Parameters of one rank of a pipeline stage."""

    input_embedding: int
    copied_embedding: int  # the input embedding once more, for MTP or an output that shares it
    output_embedding: int
    experts: int  # routed ones
    mtp: int  # of the layers that predict further tokens, apart from their experts
    mtp_experts: int
    other: int

    @property
    def embedding(self) -> int:
        return self.input_embedding + self.copied_embedding + self.output_embedding

    @property
    def dense(self) -> int:
        """All parameters that are not cut by expert parallelism."""
        return self.embedding + self.mtp + self.other

    @property
    def all_experts(self) -> int:
        return self.experts + self.mtp_experts

    @property
    def total(self) -> int:
        return self.dense + self.all_experts


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model and of its ranks."""

    stages: tuple[Stage, ...]
    total: int  # without MTP
    active: int  # of these, those that a token meets, both embeddings included
    input_embedding: int
    mtp: int  # experts included


def count(model: Model, layout: Layout, arguments: Arguments) -> Parameters:
    """Raises BuildError with what Megatron-Core says. Megatron has to be importable: see `prepare`."""
    check(arguments)
    kinds: dict[int, Stage] = {}
    for stage in _distinct_stages(model, layout):
        kinds[stage] = _count_stage(model, layout, arguments, stage)
    # All stages between the first and the last are alike.
    stages = tuple(kinds.get(i, kinds[min(1, layout.pp - 1)]) for i in range(layout.pp))
    experts = sum(s.experts for s in stages) * layout.ep
    rest = sum(s.input_embedding + s.output_embedding + s.other for s in stages)
    return Parameters(
        stages=stages,
        total=rest + experts,
        active=rest + experts * model.topk // model.num_experts,
        input_embedding=sum(s.input_embedding for s in stages),
        mtp=sum(s.mtp + s.mtp_experts * layout.ep for s in stages),
    )


def prepare() -> None:
    """Makes Megatron-Core usable without a GPU in this process; once, before it is imported."""
    from recipes.plan import devices
    from uccl_ep_train.megatron import cpu_shims

    devices.join("cpu", 0)
    cpu_shims.install()
    cpu_shims.install_for_local_spec()


def check(arguments: Arguments) -> None:
    """Makes the TransformerConfig of the run itself. Raises BuildError for what Megatron-Core refuses."""
    from megatron.core import utils
    from packaging.version import Version

    before = utils._te_version
    if sys.modules.get("transformer_engine") is None:
        utils._te_version = Version(_ASSUMED_TE)  # else every FP8 option is refused
        arguments = arguments | {"moe_permute_fusion": None}  # else its kernel is looked for
    try:
        _config(arguments)
    finally:
        utils._te_version = before


def _distinct_stages(model: Model, layout: Layout) -> list[int]:
    last = layout.last_stage_layers
    if last is None and model.num_layers % layout.pp:
        raise BuildError(f"{model.num_layers} layers do not divide into {layout.pp} equal stages")
    first = (
        model.num_layers // layout.pp if last is None else (model.num_layers - last) // max(1, layout.pp - 1)
    )
    if layout.pp > 1 and model.first_dense_layers > first:
        raise BuildError(
            f"the first stage has {first} of {model.first_dense_layers} dense layers; all are needed"
        )
    return sorted({0, min(1, layout.pp - 1), layout.pp - 1})


def _config(arguments: Arguments, **changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if arguments.get("multi_latent_attention") else TransformerConfig
    given = config_arguments(arguments) | changes
    if given.get("moe_token_dispatcher_type") == "uccl_ep":
        # What the plug-in turns its dispatcher's name into.
        given |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    try:
        return kind(**given)
    except (ValueError, AssertionError, TypeError) as error:
        raise BuildError(f"Megatron-Core refuses the configuration: {error}") from error


def _count_stage(model: Model, layout: Layout, arguments: Arguments, stage: int) -> Stage:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = stage * layout.dp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.num_ranks)
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        gpt = _build(model, layout, arguments, stage)
        return _sort(gpt, first=stage == 0)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _build(model: Model, layout: Layout, arguments: Arguments, stage: int) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    plain = {k: v for k, v in arguments.items() if k not in _NEEDS_TE | _RECOMPUTE}
    # A dispatcher has no parameters, and uccl_ep would look for its peers.
    plain |= {"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": None}
    config = _config(
        plain, transformer_impl="local", use_cpu_initialization=True, perform_initialization=False
    )
    if plain["position_embedding_type"] == "yarn":
        set_yarn(config, plain)
    model_parallel_cuda_manual_seed(1)
    try:
        with torch.device("meta"):
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=plain["normalization"]
            )
            if model.latent:
                attention.use_in(spec, model.latent.q_rank)
            mtp = (
                get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
                if model.mtp_layers
                else None
            )
            return GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=model.vocab_size,
                max_sequence_length=layout.sequence_length,
                pre_process=stage == 0,
                post_process=stage == layout.pp - 1,
                share_embeddings_and_output_weights=model.tied_embeddings,
                position_embedding_type=plain["position_embedding_type"],
                rotary_base=model.rope_theta,
                mtp_block_spec=mtp,
            )
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise BuildError(f"Megatron-Core does not build stage {stage}: {error}") from error


def set_yarn(config: Any, arguments: Arguments) -> None:
    """Stretched positions of ordinary attention: Megatron reads them off the configuration by these names."""
    config.yarn_rotary_scaling_factor = arguments["rotary_scaling_factor"]
    config.yarn_original_max_position_embeddings = arguments["yarn_original_max_position_embeddings"]
    config.yarn_mscale, config.yarn_mscale_all_dim = arguments["mscale"], arguments["mscale_all_dim"]
    config.yarn_beta_fast, config.yarn_beta_slow = 32.0, 1.0
    config.yarn_correction_range_round_to_int = False


def _sort(gpt: torch.nn.Module, first: bool) -> Stage:
    sizes: Counter[str] = Counter()
    for name, parameter in gpt.named_parameters():
        kind = "experts" if ".experts." in name else "other"
        if name.startswith("mtp."):
            kind = "mtp_experts" if kind == "experts" else "mtp"
        elif name.startswith("embedding."):
            kind = "input_embedding" if first else "copied_embedding"
        elif name.startswith("output_layer."):
            kind = "output_embedding"
        sizes[kind] += parameter.numel()
    return Stage(**{name: sizes[name] for name in Stage.__dataclass_fields__})
