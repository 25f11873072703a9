"""A cell of the step-time benchmark on ranks that stay."""

from __future__ import annotations

import gc
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel

from bench.step_cases import base_recipe, cells_of, parse_args
from bench.step_measure import measure
from recipes.plan import devices
from tests.megatron.training_case import initialize


def models_left(rank: int, data_dir: str, device: str) -> tuple[list[str], int]:
    """The dispatchers that trained a cell, and how many more models live after it than before."""
    initialize(1, 4, 1)
    # As many layers as TrainCase: Megatron sums auxiliary losses by layer as long as the process lives.
    args = parse_args(
        [f"--device={device}", "--layers=2", "--micro-batch-tokens=64", "--steps=2", "--warmup=1"]
    )
    recipe, _ = devices.place(base_recipe(args))
    (cell,) = cells_of(args, recipe)
    before = live_models()
    trained, _ = measure(cell, args.dispatchers, args.warmup, Path(data_dir), lambda _done, _total: None)
    return [entry.dispatcher for entry in trained], live_models() - before


def live_models() -> int:
    gc.collect()
    return sum(type(found) is GPTModel for found in gc.get_objects())
