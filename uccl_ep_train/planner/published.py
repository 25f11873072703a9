"""A closed form for what others published: a fixed time, and the slowest of NIC, SMs and the node's own
network.

    us = fixed + row bytes x max(rows to other nodes / NIC, rows to all nodes / SMs, rows to ranks / link)

Four rates for each system and operation. A fit draws them to what vendors and our own kernels suggest,
because three sizes alone do not determine them: PRIOR, the same for all systems.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from uccl_ep_train.errors import InputError
from uccl_ep_train.planner.fit import least_squares
from uccl_ep_train.planner.shape import Router, Shape, row_bytes

PRIOR = {"fixed_us": (100.0, 1.0), "nic_share": (0.9, 0.1), "sm_gbps": (90.0, 0.3), "link_share": (0.9, 0.1)}
"""Name: (value, standard deviation of its logarithm). Shares are of the vendor's rates."""
_NOISE = 0.05  # standard deviation of a row's logarithm
_NODE = 8  # GPUs
_GROUPS = 4  # nodes of a token at most, where routing is limited


@dataclass(frozen=True)
class Figure:
    """A published row. us: as printed, or computed from printed GB/s. Bytes of rows: to
    other nodes, to all nodes, and to ranks of the same node."""

    system: str
    op: str
    dtype: str
    ranks: int
    us: float
    wire_bytes: float
    all_bytes: float
    link_bytes: float
    nic_gbps: float
    link_gbps: float
    use: str
    anomaly: str

    @property
    def group(self) -> tuple[str, str]:
        """Rows that share rates."""
        return self.system, self.op

    def __str__(self) -> str:
        return f"{self.system} {self.op} {self.dtype} EP{self.ranks}"


def read(path: Path) -> list[Figure]:
    """Of bench/published.json. Raises InputError where the file cannot be read."""
    try:
        systems = json.loads(path.read_text())["systems"]
        return [_figure(s, row) for s in systems for row in s["rows"]]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} cannot be read: {error!r}") from None


def _figure(system: Mapping[str, Any], row: Mapping[str, Any]) -> Figure:
    nodes = row["ranks"] // _NODE
    experts = system["experts"] or 8 * row["ranks"]
    limited = "groups" in system["routing"]
    router = Router(
        num_experts=experts,
        topk=system["topk"],
        num_groups=nodes if limited else None,
        group_topk=min(nodes, _GROUPS) if limited else None,
    )
    shape = Shape.split(row["ranks"], _NODE, router=router, tokens=system["tokens"], hidden=system["hidden"])
    rows = float(shape.counts.to_domain_SD.sum())
    link_rows = float(shape.counts.to_rank_SR.sum()) * (_NODE - 1) / _NODE
    size = row_bytes(system["hidden"], row["dtype"])
    us = row["us"] if "us" in row else rows * size / row["gbytes_per_s"] / 1e3
    return Figure(
        system["name"], row["op"], row["dtype"], row["ranks"], us, rows * size * (nodes - 1) / nodes, rows
        * size, link_rows * size, system["nic_gbytes_per_s"], system["link_gbytes_per_s"], system["use"],
        row.get("anomaly", ""),
    )  # fmt: skip


def predict(figure: Figure, rates: Sequence[float]) -> float:
    fixed, nic, sm, link = rates
    slowest = max(
        figure.wire_bytes / (nic * figure.nic_gbps),
        figure.all_bytes / sm,
        figure.link_bytes / (link * figure.link_gbps),
    )
    return fixed + 1e-3 * slowest


def fit(figures: Sequence[Figure]) -> list[float]:
    """The rates, in the order of PRIOR."""
    centre = np.log([value for value, _ in PRIOR.values()])
    widths = np.array([width for _, width in PRIOR.values()])

    def residuals(x: np.ndarray) -> np.ndarray:
        rates = np.exp(centre + widths * x)
        return np.array([np.log(predict(f, rates) / f.us) for f in figures])

    # In these units a prior's deviation is 1, so its weight beside a row's is the square of _NOISE.
    best = min(
        (least_squares(residuals, np.array(start), 40, _NOISE**2, np.zeros(len(PRIOR))) for start in _STARTS),
        key=lambda x: float((residuals(x) ** 2).sum() + _NOISE**2 * (x**2).sum()),
    )
    return [float(v) for v in np.exp(centre + widths * best)]


_STARTS = ([0.0, 0.0, 0.0, 0.0], [1.0, 0.0, -1.0, 0.0], [-1.0, 0.5, 1.0, 0.0])


def held_out(figures: Sequence[Figure]) -> Iterator[tuple[Figure, float]]:
    """(figure, predicted / published - 1), each number of ranks left out of its system's fit in turn."""
    used = [f for f in figures if f.use == "fit" and not f.anomaly]
    for group in dict.fromkeys(f.group for f in used):
        rows = [f for f in used if f.group == group]
        sizes = sorted({f.ranks for f in rows})
        for out in sizes if len(sizes) > 2 else ():
            rates = fit([f for f in rows if f.ranks != out])
            yield from ((f, predict(f, rates) / f.us - 1) for f in rows if f.ranks == out)


def compared(figures: Sequence[Figure]) -> Iterator[tuple[Figure, float]]:
    """Of systems that take no part in a fit, predicted by the rates of all others on 400 Gbit/s but EFA."""
    others = [f for f in figures if f.use == "fit" and not f.anomaly and "EFA" not in f.system]
    rates = fit(others)
    yield from ((f, predict(f, rates) / f.us - 1) for f in figures if f.use == "compare")
