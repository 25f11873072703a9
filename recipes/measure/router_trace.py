"""Saves what the routers chose in a few steps of a run, for benchmarks with real routing.

A .npz file: topk_idx [S, L, T, K] int16, num_experts, and the numbers of the steps. S steps, L MoE layers, T
tokens of all ranks, rank 0's first; a token's experts ascend.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recipes.models.recipe import Recipe

NUM_STEPS = 4  # saved steps, evenly over the run; the last step is one of them


def saved_steps(num_steps: int) -> list[int]:
    """Of a run, ascending."""
    return sorted({num_steps * (i + 1) // NUM_STEPS for i in range(NUM_STEPS)} - {0})


class RouterTrace:
    """Listens to the routers, on every rank; `after_step` is collective. Without a file it does nothing."""

    def __init__(self, file: Path | None, moe_layers: Iterable[Any], recipe: Recipe) -> None:
        self._file = file
        self._recipe = recipe
        self._steps = saved_steps(recipe.num_steps)
        self._chosen: list[list[torch.Tensor]] = []  # [layer][micro-batch] of the present step
        self._saved: dict[int, torch.Tensor] = {}
        for layer in moe_layers if file else ():
            self._chosen.append([])
            layer.router.register_forward_hook(self._listener(self._chosen[-1]))

    def after_step(self, step: int) -> None:
        if self._file is not None and step in self._steps:
            own_LTK = torch.stack([torch.cat(layer) for layer in self._chosen]).cpu()
            of_ranks = [torch.empty_like(own_LTK) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, own_LTK)
            self._saved[step] = torch.cat(of_ranks, dim=1).to(torch.int16)
            if dist.get_rank() == 0:
                self._write(self._file)
        for layer in self._chosen:
            layer.clear()

    def _write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            file,
            topk_idx=torch.stack(list(self._saved.values())).numpy(),
            num_experts=np.array(self._recipe.model.num_experts),
            steps=np.array(list(self._saved)),
        )

    def _listener(self, into: list[torch.Tensor]) -> Any:
        def chosen(router: Any, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            if router.training:
                # A recipe's router drops nothing, so that every token has topk experts.
                experts = output[1].nonzero()[:, 1]
                into.append(experts.view(-1, self._recipe.model.topk))

        return chosen
