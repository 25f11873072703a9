"""Core attention of multi-head latent attention where there is no TransformerEngine.

Megatron's own plain attention requires keys and values of equal size, so its local spec cannot build a latent
model. S tokens, B sequences, N heads, K and V sizes of a head's keys and values.
"""

from __future__ import annotations

from typing import Any

import torch


class LatentCoreAttention(torch.nn.Module):
    """Causal. Constructor and call are as Megatron uses them for TransformerEngine's attention."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__()
        if config.attention_dropout or config.softmax_type != "vanilla":
            raise ValueError("plain latent attention has neither dropout nor sinks")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_SBNK: torch.Tensor,
        key_SBNK: torch.Tensor,
        value_SBNV: torch.Tensor,
        _attention_mask: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """[S,B,N*V]"""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_SBNK, value_SBNV))
        out_BNSV = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale
        )
        return out_BNSV.permute(2, 0, 1, 3).flatten(2)


def use_in(block_spec: Any, q_rank: int | None) -> None:
    """Puts LatentCoreAttention into all layers of a local block spec."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class Queries(ColumnParallelLinear):
        """Replaces the projection with its own norm that Megatron 0.19 wants for uncompressed queries.
        Megatron has that projection only with TransformerEngine. The published models have no such norm."""

    for layer in block_spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = LatentCoreAttention
        if q_rank is None:
            attention.q_layernorm = IdentityOp  # only compressed queries have this norm
            attention.linear_q_proj = Queries
    # Megatron asks here for the class of that projection; its local layers have no other use for it.
    LocalSpecProvider.column_parallel_layer_norm_linear = lambda _self: Queries
