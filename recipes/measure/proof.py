"""Shows from `Buffer.stats()` that rows really crossed the domains, in every MoE layer, rail and direction.

In one validation pass the ranks wait for each other after each layer, so that the difference of two readings
belongs to that layer. The bytes have to equal what the router's map says. That may be none: early in training
a layer's router can prefer one domain's experts for every token. T tokens, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recipes.models.recipe import Recipe
from recipes.plan import devices
from uccl_ep_train.planner.shape import row_bytes as wire_row_bytes


class ProofError(RuntimeError):
    """Rows did not cross the domains as they should have."""


@dataclass(frozen=True)
class Crossing:
    """What one rank shipped to one other domain in one layer's forward pass; bytes on the wire."""

    layer: int
    rank: int
    domain: int
    dispatch_bytes: int  # its own rows, on CPUs with their probabilities
    expected_dispatch_bytes: int  # of these, by the router's map
    combine_bytes: int  # sums of its domain's experts that it relays back
    expected_combine_bytes: int  # of these, by the maps of the ranks that it relays for

    def holds(self) -> bool:
        return (
            self.dispatch_bytes == self.expected_dispatch_bytes
            and self.combine_bytes == self.expected_combine_bytes
        )


def expected_dispatch_bytes(wanted_TE: torch.Tensor, recipe: Recipe) -> int:
    """`wanted_TE`: the router's map for a domain's experts. A row goes there once, on CPUs with a probability
    per pair. GPUs send the probabilities with the routing, and rows padded to multiples of 128 bytes.
    """
    row_bytes = wire_row_bytes(recipe.model.hidden_size, recipe.dispatch_dtype)
    if devices.own().type == "cuda":
        return num_rows(wanted_TE) * -(-row_bytes // 128) * 128
    return num_rows(wanted_TE) * row_bytes + 4 * int(wanted_TE.sum())


def num_rows(wanted_TE: torch.Tensor) -> int:
    """Tokens that want at least one of these experts: as many rows go there, and as many sums come back."""
    return int(wanted_TE.any(dim=1).sum())


def _measured(layer: Any, recipe: Recipe, into: list[Crossing]) -> Callable[..., Any]:
    """`layer.forward`, which also adds an entry to `into` for each other domain."""
    buffer, forward = layer.token_dispatcher.buffer, layer.forward
    topology, rank = buffer.topology, buffer.rank
    own_domain = topology.domain_of[rank]
    num_local = recipe.model.num_experts // recipe.num_ranks
    sum_bytes = (4 if buffer.config.wire.combine_wire_dtype == "fp32" else 2) * recipe.model.hidden_size
    experts = [
        [e for m in ranks for e in range(m * num_local, (m + 1) * num_local)] for ranks in topology.members
    ]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = buffer.stats()
        result = forward(*args, **kwargs)
        devices.synchronize()
        map_TE = layer.token_dispatcher.routing_map
        rows: list[Any] = [None] * topology.num_ranks  # [rank][domain]
        # Also a barrier: what this rank relays for others has been shipped when they have it.
        dist.all_gather_object(rows, [num_rows(map_TE[:, wanted]) for wanted in experts])
        after = buffer.stats()
        for domain, members in enumerate(topology.members):
            if domain == own_domain:
                continue
            names = [f"ship.{kind}.domain{domain}.bytes" for kind in ("rows", "return")]
            dispatched, returned = (int(after.get(n, 0) - before.get(n, 0)) for n in names)
            sums = sum(rows[m][own_domain] for m in members if topology.rail(m, own_domain) == rank)
            expected = expected_dispatch_bytes(map_TE[:, experts[domain]], recipe), sums * sum_bytes
            into.append(
                Crossing(layer.layer_number, rank, domain, dispatched, expected[0], returned, expected[1])
            )
        return result

    return wrapper


def check(crossings: list[Crossing]) -> None:
    """Raises ProofError for the first that differs from the maps, or if a rank never reached a domain."""
    broken = next((c for c in crossings if not c.holds()), None)
    if broken is not None:
        raise ProofError(f"bytes that crossed domains are not those of the router's map: {broken}")
    shipped: Counter[tuple[int, int]] = Counter()
    for c in crossings:
        shipped[c.rank, c.domain] += c.dispatch_bytes
    for (rank, domain), num_bytes in shipped.items():
        if num_bytes == 0:
            raise ProofError(f"in no layer did a row of rank {rank} go to domain {domain}")


def measure(moe_layers: list[Any], recipe: Recipe, run: Callable[[], Any]) -> list[Crossing]:
    """Calls `run`, a forward pass, and returns what all ranks shipped in it. Collective.

    Raises ProofError, see `check`. A group of one domain ships nothing and proves nothing: the list is empty.
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
    check(crossings)
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
