"""Model FLOPs of a training step, and the peak of a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Dense BF16 FLOP/s of the tensor cores, from NVIDIA's data sheets (their figures "with sparsity" are twice
# as large). A key is the start of the name that torch.cuda.get_device_name returns; the longest match counts.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,  # SXM
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200": 989.4e12,
    "NVIDIA H20": 148e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_name: str) -> float | None:
    """None if the peak is not known. CPUs have no entry: their peak depends on clocks that nobody states."""
    known = [name for name in PEAK_FLOPS if re.match(rf"{re.escape(name)}(?![\w])", device_name)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def flops_per_token(
    named_parameters: Iterable[tuple[str, Any]], config: Any, sequence_length: int
) -> float | None:
    """FLOPs of forward and backward, for each token of a sequence:

        6 N + 6 L S D        N  parameters of the matrix products that a token goes through
                             L  layers, S  sequence length, D  heads x width of a head (the mean of a query's
                                and a value's, where they differ)

    The source is Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B ("model
    FLOPs utilization"). A parameter takes a multiplication and an addition in forward, and twice that in
    backward. Recomputation is not counted. Attention is 12 L S D there. Here it is half of that, because a
    token attends only to earlier ones. Megatron-LM counts it in the same way
    (`num_floating_point_operations`).

    named_parameters  of this rank's GPTModel. The embedding counts only if it is also the output layer's
    weight, because a look-up is not a product. A token goes through top-k experts (".experts." in the name)
    of average size, on whichever ranks they are.

    None for a model that is split by tensor or pipeline parallelism: a rank then has a part of the matrices.
    """
    cuts = (config.tensor_model_parallel_size, config.expert_tensor_parallel_size or 1)
    if max(*cuts, config.pipeline_model_parallel_size) > 1:
        return None
    sizes = {name: p.numel() for name, p in named_parameters if p.dim() >= 2}
    has_output_layer = any(name.endswith("output_layer.weight") for name in sizes)
    dense, experts = 0, 0
    for name, size in sizes.items():
        if name.endswith("embeddings.weight") and has_output_layer:
            continue
        if ".experts." in name:
            experts += size
        else:
            dense += size
    num_local = config.num_moe_experts // config.expert_model_parallel_size
    products = dense + experts * config.moe_router_topk / num_local
    return 6 * products + 6 * config.num_layers * sequence_length * _attention_width(config)


def _attention_width(config: Any) -> float:
    if getattr(config, "multi_latent_attention", False):
        widths = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
        return config.num_attention_heads * widths / 2
    return config.num_attention_heads * (
        config.kv_channels or config.hidden_size // config.num_attention_heads
    )
