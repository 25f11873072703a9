"""Runs on the ranks: DeepSeek-V3's piece, shrunken, through the recipe's own build and training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recipes import RECIPES
from recipes.models.architecture import Latent
from recipes.models.recipe import Recipe
from recipes.plan import devices
from recipes.training import dispatchers, loop
from recipes.training.build import build
from tests.megatron.settings import ProxyOutcome
from tests.megatron.training_case import digest, initialize
from uccl_ep_train.megatron import plugin

NUM_STEPS = 3


def shrunken(dispatcher: str, limited: bool) -> Recipe:
    """Two experts a token, so that a sum has two terms and the same bits in any order."""
    recipe = RECIPES["dsv3_proxy_4xh200"]()
    model = recipe.model
    groups = {"num_groups": 4, "group_topk": 1} if limited else {"num_groups": None, "group_topk": None}
    return dataclasses.replace(
        recipe,
        hardware="",
        device=devices.own().type,
        transformer_engine=False,
        model=dataclasses.replace(
            model,
            hidden_size=128,
            num_heads=4,
            latent=Latent(q_rank=48, kv_rank=32, nope_dim=16, rope_dim=16, value_dim=24),
            dense_ffn_size=192,
            expert_ffn_size=64,
            shared_ffn_size=64,
            num_experts=16,
            topk=2,
            router=dataclasses.replace(model.router, **groups),
        ),
        domain_size=2,
        sequence_length=32,
        micro_batch_size=2,
        num_microbatches=2,
        num_steps=NUM_STEPS,
        warmup_steps=0,
        lr=1e-2,
        token_dispatcher=dispatcher,
        dispatch_dtype="bf16",
        budget_bytes=32 << 20,
    )


@dataclass(frozen=True)
class _Batches:
    """Counting, from places that the rank's generator chooses."""

    recipe: Recipe

    def micro_batch(self, index: int) -> dict[str, torch.Tensor]:
        shape = (self.recipe.micro_batch_size, self.recipe.sequence_length)
        generator = torch.Generator().manual_seed(1000 * index + dist.get_rank())
        start = torch.randint(256, (shape[0], 1), generator=generator)
        tokens = (start + torch.arange(shape[1] + 1)) % 256
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(shape[1]).expand(shape),
            "loss_mask": torch.ones(shape),
        }
        return {name: value.to(devices.own()) for name, value in batch.items()}


def train_proxy(rank: int, dispatcher: str, limited: bool = True) -> ProxyOutcome:
    recipe = shrunken(dispatcher, limited)
    initialize()
    plugin.disable()
    try:
        training = build(recipe, dispatchers.enable(recipe))
        dispatchers.verify(recipe, training)
        layers = list(training.moe_layers())
        chosen: list[torch.Tensor] = []
        for layer in layers:
            layer.router.register_forward_hook(lambda _router, _inputs, out: chosen.append(out[1]))
        batches: Any = _Batches(recipe)
        losses = [loop.train_step(training, batches, recipe, step) for step in range(1, NUM_STEPS + 1)]
        named = list(training.model.named_parameters())
        return ProxyOutcome(
            losses=tuple(losses),
            parameters=digest(*(p for _, p in named)),
            bias=tuple(layers[-1].router.expert_bias.tolist()),
            most_groups=max(_groups(chosen)),
            shared=sum(p.numel() for name, p in named if "shared_experts" in name),
            dispatchers=tuple(type(layer.token_dispatcher).__name__ for layer in layers),
        )
    finally:
        plugin.disable()
        dist.barrier()


def _groups(maps_TE: list[torch.Tensor]) -> Iterator[int]:
    """Groups of four experts that a token's experts are in, the most of any token of each pass."""
    for map_TE in maps_TE:
        yield int(map_TE.bool().view(map_TE.shape[0], 4, 4).any(dim=2).sum(dim=1).max())
