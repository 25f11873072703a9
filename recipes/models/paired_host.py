"""paired_host: as small as it can be to compare dispatchers over several seeds, on two cores of one host."""

from __future__ import annotations

from dataclasses import replace

from recipes.models.recipe import Recipe
from recipes.models.tiny_host import tiny_host


def paired_host() -> Recipe:
    """tiny_host with half its ranks and layers and a tenth of its learning rate, for `recipes.quality`.

    At tiny_host's learning rate, runs that differ by FP8's rounding drift apart by about a percent, which
    would hide 0.3 %. One domain: several give the same bits, and their proxies take a core's time.
    """
    tiny = tiny_host()
    return replace(
        tiny,
        name="paired_host",
        num_ranks=2,
        domain_size=2,
        model=replace(tiny.model, num_layers=2, expert_ffn_size=256),
        sequence_length=128,
        micro_batch_size=4,
        num_steps=300,
        warmup_steps=30,
        lr=3e-4,
        min_lr=3e-6,
        val_interval=100,
        checkpoint_interval=300,
    )
