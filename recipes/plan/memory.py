"""Memory of a rank on a GPU: an estimate, before anything is allocated.

Weights, gradients and optimizer are exact for Megatron's mixed precision: BF16 weights, FP32 gradients, and
the optimizer's FP32 master weights and two moments. Its distributed optimizer spreads these over the ranks
that hold the same parameters (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 1).

Activations are counted tensor by tensor: what a layer's backward needs of its forward. This follows
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, where a
dense layer keeps 34 bytes per token and element of the hidden size. Here there are experts, and grouped or
latent attention by a flash kernel, which keeps nothing of size S x S. A pipeline stage keeps as many
micro-batches as there are stages from it on (1F1B, section 4.2.3 there).
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.models.architecture import Model
from recipes.models.layout import FULL, Layout
from recipes.plan.parameters import Parameters, Stage

EXPERT_IMBALANCE = 1.25
"""Rows of the fullest rank's experts over the mean: what balanced routers reach in a step, assumed."""
ALLOWANCE = 0.08
"""Of a GPU's memory: CUDA's context, NCCL's buffers, workspaces of products, fragmentation; assumed."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank of one pipeline stage, by what they are for."""

    stage: int
    entries: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.entries)


def of_fullest_rank(
    model: Model, layout: Layout, parameters: Parameters, dispatcher_bytes: int, gpu_bytes: int
) -> Memory:
    """The memory of the stage that needs most."""
    stages = [_of_stage(model, layout, s, i) for i, s in enumerate(parameters.stages)]
    fullest = max(stages, key=lambda memory: memory.total_bytes)
    more = (
        ("dispatcher's buffer", dispatcher_bytes),
        ("allowance: CUDA, NCCL, fragmentation", int(ALLOWANCE * gpu_bytes)),
    )
    return Memory(fullest.stage, fullest.entries + more)


def _of_stage(model: Model, layout: Layout, stage: Stage, index: int) -> Memory:
    spread = (layout.dp, layout.dp // layout.ep) if layout.distributed_optimizer else (1, 1)
    optimizer = layout.optimizer_bytes * (stage.dense // spread[0] + stage.all_experts // spread[1])
    products = stage.other + stage.mtp + stage.all_experts if layout.fp8_recipe else 0
    tokens = layout.tokens_per_pass
    in_flight = min(layout.num_microbatches, layout.pp - index)
    kept = layer_counts(model, layout)[index]
    saved = sum(
        n * saved_bytes(model, layout.recompute, bool(layout.fp8_recipe), moe=moe)
        for moe, n in zip((False, True), kept, strict=True)
    )
    # In the backward of a layer all its activations are there, recomputed or not, and about as many bytes of
    # gradients.
    largest = max(
        saved_bytes(model, (), bool(layout.fp8_recipe), moe=moe)
        for moe, n in zip((False, True), kept, strict=True)
        if n
    )
    logits = 0
    if index == layout.pp - 1:  # BF16 and FP32 of each prediction, FP32 gradient
        logits = tokens * model.vocab_size * (6 * (1 + model.mtp_layers) + 4)
    return Memory(
        index,
        (
            ("weights, BF16", 2 * stage.total),
            ("weights quantised for products, both ways", 2 * products),
            ("gradients, FP32", 4 * stage.total),
            ("gradients of a layer's weights, BF16, not added yet", 2 * stage.all_experts // max(1, kept[1])),
            (f"optimizer, {layout.optimizer_bytes} bytes a parameter, distributed", optimizer),
            (f"activations of {in_flight} micro-batches", int(tokens * in_flight * saved)),
            ("one layer in backward", int(2 * tokens * largest)),
            ("logits and their gradient", logits),
        ),
    )


def layer_counts(model: Model, layout: Layout) -> list[tuple[int, int]]:
    """Dense and MoE layers of each stage; those of MTP are MoE layers of the last one."""
    last = layout.last_stage_layers
    each = (
        model.num_layers // layout.pp if last is None else (model.num_layers - last) // max(1, layout.pp - 1)
    )
    sizes = [each] * (layout.pp - 1) + [each if last is None else last]
    dense = [model.first_dense_layers] + [0] * (layout.pp - 1)
    counts = [(d, n - d) for d, n in zip(dense, sizes, strict=True)]
    counts[-1] = (counts[-1][0], counts[-1][1] + model.mtp_layers)
    return counts


def saved_bytes(model: Model, recompute: tuple[str, ...], fp8: bool, *, moe: bool) -> float:
    """What a layer keeps for backward, per token. A product in FP8 keeps its input in FP8, with scales."""
    hidden = 2 * model.hidden_size
    if recompute == FULL:
        return hidden  # the layer's input
    element = 1 + 4 / 128 if fp8 else 2
    norms = 2 * hidden  # inputs of both norms
    outputs = 0.0 if "layernorm" in recompute else element * model.hidden_size  # of attention's norm
    mlp = _experts_bytes(model, recompute, element) if moe else _dense_bytes(model, recompute, element)
    # The second norm's output: what MLP or experts are recomputed from, and the router's input in any case.
    return norms + outputs + hidden + _attention_bytes(model, recompute, element) + mlp


def _attention_bytes(model: Model, recompute: tuple[str, ...], element: float) -> float:
    """Queries, keys, values as the kernel takes them, its output and statistic; latents, norms of heads."""
    heads = model.num_heads
    if model.latent:
        at = model.latent
        ups = 2 * heads * (2 * (at.nope_dim + at.rope_dim) + at.value_dim)
        ranks = (at.q_rank or 0) + at.kv_rank
        downs = (2 + element) * ranks + 2 * at.rope_dim  # before and after their norms
        return (0 if "mla_up_proj" in recompute else ups) + downs + 2 * heads * at.value_dim + 4 * heads
    dim = model.head_dim or model.hidden_size // heads
    groups = model.num_query_groups or heads
    before_norm = 2 * (heads + groups) * dim if model.qk_norm else 0
    return 2 * (heads + 2 * groups) * dim + before_norm + 2 * heads * dim + 4 * heads


def _mlp_bytes(hidden: int, ffn: int, gated: bool, element: float, act: bool) -> float:
    """Inputs of both products and of the activation."""
    return element * hidden + 2 * ffn * (2 if gated else 1) + (element * ffn if act else 0)


def _dense_bytes(model: Model, recompute: tuple[str, ...], element: float) -> float:
    if "mlp" in recompute:
        return 0.0
    ffn = model.dense_ffn_size or model.expert_ffn_size
    return _mlp_bytes(model.hidden_size, ffn, model.activation != "gelu", element, act=True)


def _experts_bytes(model: Model, recompute: tuple[str, ...], element: float) -> float:
    if "moe" in recompute:
        return 0.0
    gated = model.activation != "gelu"
    row = _mlp_bytes(model.hidden_size, model.expert_ffn_size, gated, element, act="moe_act" not in recompute)
    router = 4 * 4 * model.num_experts  # logits, scores, probabilities, map: FP32 at most
    shared = 0.0
    if model.shared_ffn_size and "shared_experts" not in recompute:
        shared = _mlp_bytes(model.hidden_size, model.shared_ffn_size, gated, element, act=True)
    return model.topk * EXPERT_IMBALANCE * row + router + shared
