"""Shows from `Buffer.stats()` that rows really crossed the domains, in every MoE layer, rail and direction.

One validation pass with a barrier after each layer, so that the difference of two readings belongs to that
layer. The bytes have to equal what the router's map says. T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recipes.settings import Recipe

_FP8_BLOCK = 128


class ProofError(RuntimeError):
    """Rows did not cross the domains as they should have."""


@dataclass(frozen=True)
class Crossing:
    """What one rank shipped to one other domain in one layer's forward pass; bytes on the wire."""

    layer: int
    rank: int
    domain: int
    dispatch_bytes: int  # its own rows and their probabilities
    expected_bytes: int  # of these, by the router's map
    combine_bytes: int  # sums of its domain's experts that it relays back

    def holds(self) -> bool:
        return 0 < self.dispatch_bytes == self.expected_bytes and self.combine_bytes > 0


def expected_bytes(wanted_TE: torch.Tensor, recipe: Recipe) -> int:
    """`wanted_TE`: the router's map for a domain's experts. A row goes there once, a probability per pair."""
    scale_bytes = -(-4 * recipe.hidden_size // _FP8_BLOCK // 16) * 16  # fp32 per block, a multiple of 16
    row_bytes = recipe.hidden_size + scale_bytes if recipe.dispatch_dtype == "fp8" else 2 * recipe.hidden_size
    return int(wanted_TE.any(dim=1).sum()) * row_bytes + 4 * int(wanted_TE.sum())


def _measured(layer: Any, recipe: Recipe, into: list[Crossing]) -> Callable[..., Any]:
    """`layer.forward`, with an entry in `into` for each other domain."""
    buffer, forward = layer.token_dispatcher.buffer, layer.forward
    num_local = recipe.num_experts // recipe.num_ranks

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = buffer.stats()
        result = forward(*args, **kwargs)
        dist.barrier()  # what this rank relays for others has been shipped when they have it
        after = buffer.stats()
        map_TE = layer.token_dispatcher.routing_map
        for domain, members in enumerate(buffer.topology.members):
            if buffer.rank in members:
                continue
            experts = [e for m in members for e in range(m * num_local, (m + 1) * num_local)]
            names = [f"ship.{kind}.domain{domain}.bytes" for kind in ("rows", "return")]
            rows, returned = (int(after.get(n, 0) - before.get(n, 0)) for n in names)
            expected = expected_bytes(map_TE[:, experts], recipe)
            into.append(Crossing(layer.layer_number, buffer.rank, domain, rows, expected, returned))
        return result

    return wrapper


def measure(moe_layers: list[Any], recipe: Recipe, run: Callable[[], Any]) -> list[Crossing]:
    """Calls `run`, a forward pass, and returns what all ranks shipped in it. Collective.

    Raises ProofError naming the first layer and rank whose rows did not cross as the map says. A group that
    is one domain ships nothing and proves nothing: an empty list.
    """
    own: list[Crossing] = []
    stock = [layer.forward for layer in moe_layers]
    for layer in moe_layers:
        layer.forward = _measured(layer, recipe, own)
    try:
        run()
    finally:
        for layer, forward in zip(moe_layers, stock, strict=True):
            layer.forward = forward
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    crossings = sorted((c for part in gathered for c in part), key=lambda c: (c.layer, c.rank, c.domain))
    broken = next((c for c in crossings if not c.holds()), None)
    if broken is not None:
        raise ProofError(f"bytes that crossed domains are not those of the router's map: {broken}")
    return crossings


def table(crossings: list[Crossing]) -> str:
    """A line per layer: bytes of each rank's dispatch and combine to each other domain."""
    lines = ["bytes to another domain in one forward pass (dispatch + combine), from Buffer.stats():"]
    for layer in sorted({c.layer for c in crossings}):
        cells = [
            f"rank {c.rank} to domain {c.domain}: {c.dispatch_bytes:,d} + {c.combine_bytes:,d}"
            for c in crossings
            if c.layer == layer
        ]
        lines.append(f"  layer {layer}:  " + ";  ".join(cells))
    return "\n".join(lines)
