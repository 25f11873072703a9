"""The recipe's choice of dispatcher, its proof at the end, and the ablations (negative controls)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from recipes.models.recipe import Recipe
from recipes.plan.arguments import DISPATCHERS
from recipes.training.build import Training


def enable(recipe: Recipe) -> dict[str, Any]:
    """The TransformerConfig arguments that select the recipe's dispatcher."""
    if recipe.token_dispatcher != "uccl_ep":
        return dict(DISPATCHERS[recipe.token_dispatcher])
    from uccl_ep_train.megatron import plugin

    return plugin.enable(
        dispatch_dtype=recipe.dispatch_dtype,
        grad_dtype=recipe.grad_dtype,
        budget_bytes=recipe.budget_bytes,
        window_tokens=recipe.layout.tokens_per_pass,
        domain_size=recipe.domain_size,
        backend="cuda" if recipe.device == "cuda" else "host",
    )


def verify(recipe: Recipe, training: Training) -> None:
    """Raises unless every MoE layer has the dispatcher that the recipe names."""
    if recipe.token_dispatcher == "uccl_ep":
        from uccl_ep_train.megatron import plugin

        plugin.verify(training.model)
        return
    for layer in training.moe_layers():
        name = type(layer.token_dispatcher).__name__
        if recipe.token_dispatcher.split("-")[0] not in name.lower():
            raise RuntimeError(f"MoE layer {layer.layer_number} has {name}, not {recipe.token_dispatcher}")


def ablate(recipe: Recipe, moe_layers: Iterable[Any]) -> None:
    """zero_experts: the experts return zeros. zero_prob_grad: the router gets no gradient through its
    probabilities (the fault that no test of Megatron's own notices). wrong_scale: rows come out of FP8 at
    half their value. That is as if their codes were read with the exponent bias of the other e4m3 (8 in AMD's
    "fnuz", 7 in OCP's)."""
    for layer in moe_layers:
        if recipe.ablate == "zero_experts":
            layer.experts.forward = _zeroed(layer.experts.forward)
        elif recipe.ablate == "zero_prob_grad":
            layer.token_dispatcher.dispatch_preprocess = _without_gradient(
                layer.token_dispatcher.dispatch_preprocess
            )
        elif recipe.ablate == "wrong_scale":
            layer.token_dispatcher.dispatch_postprocess = _with_wrong_scale(
                layer.token_dispatcher.dispatch_postprocess
            )


def _zeroed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def experts(*args: Any) -> Any:
        out, bias = forward(*args)
        return out * 0, bias

    return experts


class _ZeroGradient(torch.autograd.Function):
    """The identity, with a gradient of zeros. Unlike with detach(), a loss that depends on the probabilities
    further up (Megatron's load-balancing loss) still gets its backward."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor) -> torch.Tensor:
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


def _without_gradient(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch_preprocess(hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        return preprocess(hidden, routing_map, _ZeroGradient.apply(probs))

    return dispatch_preprocess


class _Halved(torch.autograd.Function):
    """Half of each value. The gradient passes unchanged, as it does through FP8: the backward of a dispatch
    knows nothing of scales."""

    @staticmethod
    def forward(ctx: Any, rows_RH: torch.Tensor) -> torch.Tensor:
        return rows_RH * 0.5

    @staticmethod
    def backward(ctx: Any, grad_RH: torch.Tensor) -> torch.Tensor:
        return grad_RH


def _with_wrong_scale(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch_postprocess(*args: Any) -> Any:
        rows_RH, tokens_per_expert, probs = postprocess(*args)
        return _Halved.apply(rows_RH), tokens_per_expert, probs

    return dispatch_postprocess
