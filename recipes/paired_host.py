"""paired_host: as small as it can be to compare dispatchers over several seeds, on two cores of one host."""

from __future__ import annotations

from dataclasses import replace

from recipes.settings import Recipe
from recipes.tiny_host import tiny_host


def paired_host() -> Recipe:
    """tiny_host with half its ranks and layers, for `recipes.quality`."""
    return replace(
        tiny_host(),
        name="paired_host",
        num_ranks=2,
        domain_size=2,
        num_layers=2,
        expert_ffn_size=256,
        sequence_length=128,
        num_steps=300,
        lr=3e-4,
        min_lr=3e-6,
        val_interval=100,
        checkpoint_interval=300,
    )
