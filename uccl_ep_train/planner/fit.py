"""Fits the rates of `machine.Kernels` to measured operations, and says how well they predict others.

Which rows are used, and which of them are fitted, is written here before any error is known: FILES,
`_refusal`,
`_FITTED`. A fit minimises squared logarithms of predicted / measured time, with as many rates as Kernels has
for all rows together; no rate belongs to a row, a file or a size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from uccl_ep_train.errors import InputError
from uccl_ep_train.planner.events import simulate
from uccl_ep_train.planner.machine import MACHINES, Kernels, Machine
from uccl_ep_train.planner.protocol import Protocol, protocol_of
from uccl_ep_train.planner.shape import Router, Shape

FILES = {
    "h200_x2_house.json": ("4a56ab2", "newest commit with 2 GPUs in one domain"),
    "h200_x4_one_domain_24_sms.json": ("4a56ab2", "newest commit with 4 GPUs in one domain, hidden 7168"),
    "h200_x4_hidden_2048.json": ("18aa3cd", "newest commit with 4 GPUs in one domain, hidden 2048"),
    "h200_x2_two_domains.json": ("bcf5232", "only commit with H200 as 2 x 1 on a link of 50 GB/s"),
    "h100_x2_two_domains.json": ("8a90ee1", "only commit with H100 as 2 x 1 on a link of 50 GB/s"),
    "h200_x4_two_domains.json": ("4a56ab2", "newest commit as 2 x 2"),
    "h200_x4_four_domains.json": ("4a56ab2", "newest commit as 4 x 1"),
}
"""Of bench/results: the commit whose rows are used, and why. Other files are of earlier commits: of these
shapes, of hidden 4096 (8 cached rows: mean 7.6 %, largest 22 %), of 64 SMs (12: 14 %, 34 %)."""
OLD_HOST_PATH = ("bcf5232", "8a90ee1")
"""Before d556fca, which replaced what the host does behind the counts of a new plan."""
PLAN_OF = {"uncached": "new", "sync_free": "sync_free", "cached_plan": "cached"}


START = Kernels(
    place_ns=0.65,
    pull_ns=1.0,
    codes_ns=1.5,
    expand_ns=0.55,
    expand_row_ns=2.3,
    step_ns=1.7,
    step_byte_ns=0.23,
    merge_ns=1.8,
    dispatch_us=15.0,
    combine_us=20.0,
    plan_us=24.0,
    plan_token_ns=4.0,
    host_us=40.0,
    member_us=4.0,
    link_share=0.95,
    hop_us=24.0,
    relay_us=15.0,
)
"""What a fit starts from and is weakly drawn to: read off the kernels' sources and the same measurements."""


@dataclass(frozen=True)
class Row:
    """A measured operation. us: median over runs of the slowest rank. spread: p90 - p10 over the median."""

    file: str
    commit: str
    hardware: str
    shape: Shape
    op: str
    plan: str
    link_gbps: float
    us: float
    spread: float

    @property
    def kind(self) -> str:
        rows = "codes" if self.shape.codes else self.shape.dtype
        return f"{len(self.shape.domains)} x {self.shape.domains[0]} {self.op} {rows} {self.plan}"

    def __str__(self) -> str:
        return f"{self.kind} T={self.shape.tokens} H={self.shape.hidden} ({self.file}, {self.commit})"


def _refusal(record: Mapping[str, Any]) -> str:
    """Why a record is not predicted, or ""."""
    if record["not_run"] or record["system"] not in ("uccl_ep", "uccl_ep_sync_free", "uccl_ep_cached"):
        return "another system"
    if record["op"] not in ("dispatch", "combine"):
        return "a sum of two operations"
    if record["layout"] not in ("expert_major", "expert_major_fp8"):
        return "compact rows"
    if record["routing"] != "uniform" or record["form"] != "topk":
        return "another routing"
    if record["num_sms"] != 24 or record["stage_sms"]:
        return "another number of SMs"
    if record["domains"] > 1 and not record["link_gbytes_per_s"]:
        return "copies between GPUs without a limit stand for no network"
    if record["op"] == "combine" and (record["system"], record["layout"]) != (
        "uccl_ep_cached",
        "expert_major",
    ):
        return "the combine of the cached system again"
    if record["op"] == "combine" and record["dtype"] != "bf16":
        return "the combine of the cached system again"
    if record["mode"] == "uncached" and record["commit"] in OLD_HOST_PATH:
        return "its host path no longer exists"
    return ""


def measured(results: Path) -> list[Row]:
    """The rows of FILES in the folder bench/results. Raises InputError where a file cannot be read."""
    found: list[Row] = []
    for file, (commit, _) in FILES.items():
        try:
            records = json.loads((results / file).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{results / file} cannot be read: {error}") from None
        rows = [_row(file, r) for r in records if r["commit"] == commit and not _refusal(r)]
        found += {str(row): row for row in rows}.values()  # of the same case twice: the later
    return found


def _row(file: str, record: Mapping[str, Any]) -> Row:
    shape = Shape.split(
        record["ranks"],
        record["ranks"] // record["domains"],
        router=Router(num_experts=record["experts"], topk=record["topk"]),
        tokens=record["tokens"],
        hidden=record["hidden"],
        dtype=record["dtype"],
        codes=record["layout"] == "expert_major_fp8",
    )
    plan = "cached" if record["op"] == "combine" else PLAN_OF[record["mode"]]
    return Row(
        file, record["commit"], record["hardware"], shape, record["op"], plan,
        record["link_gbytes_per_s"], record["median_us"], (record["p90_us"] - record["p10_us"]) /
        record["median_us"],
    )  # fmt: skip


_FITTED: Mapping[str, Sequence[tuple[str, str, str, int]]] = {
    # file: (op, rows, plan, tokens)
    "h200_x2_house.json": [
        ("dispatch", "bf16", "cached", 128),
        ("dispatch", "bf16", "cached", 4096),
        ("dispatch", "fp8", "cached", 4096),
        ("dispatch", "codes", "cached", 4096),
        ("dispatch", "bf16", "sync_free", 128),
        ("dispatch", "bf16", "sync_free", 4096),
        ("dispatch", "bf16", "new", 128),
        ("combine", "bf16", "cached", 128),
        ("combine", "bf16", "cached", 4096),
    ],
    "h200_x4_one_domain_24_sms.json": [
        ("dispatch", "bf16", "cached", 4096),
        ("dispatch", "fp8", "cached", 4096),
        ("dispatch", "codes", "cached", 4096),
        ("dispatch", "codes", "new", 128),
        ("combine", "bf16", "cached", 4096),
    ],
    "h200_x4_hidden_2048.json": [
        ("dispatch", "bf16", "cached", 4096),
        ("dispatch", "fp8", "cached", 4096),
        ("dispatch", "codes", "cached", 4096),
        ("combine", "bf16", "cached", 128),
        ("combine", "bf16", "cached", 4096),
    ],
    "h200_x2_two_domains.json": [
        ("dispatch", "bf16", "cached", 128),
        ("dispatch", "fp8", "cached", 4096),
        ("combine", "bf16", "cached", 128),
    ],
    "h200_x4_two_domains.json": [
        ("dispatch", "bf16", "new", 128),
        ("combine", "bf16", "cached", 128),
    ],
}
"""24 rows that together depend on every rate: the smallest and largest sizes. All of 4 x 1, all of H100,
and every T = 1024 and 8192 are predicted only."""


def is_fitted(row: Row) -> bool:
    rows = "codes" if row.shape.codes else row.shape.dtype
    return (row.op, rows, row.plan, row.shape.tokens) in _FITTED.get(row.file, ())


@lru_cache(maxsize=1024)
def _protocol(shape: Shape) -> Protocol:
    return protocol_of(shape)


def predict(row: Row, kernels: Kernels) -> float:
    """Microseconds of the operation."""
    machine: Machine = replace(MACHINES["h200"], kernels=kernels)
    if row.link_gbps:
        machine = replace(machine, nic_gbps=row.link_gbps)
    return simulate(machine, row.shape, _protocol(row.shape), row.op, row.plan).us


def errors(rows: Sequence[Row], kernels: Kernels) -> np.ndarray:
    """Predicted / measured - 1 of each row."""
    return np.array([predict(row, kernels) / row.us - 1 for row in rows])


def fit(rows: Sequence[Row], start: Kernels = START, steps: int = 60) -> Kernels:
    """The rates with the least squared logarithms of predicted / measured."""
    names = list(start.as_dict())

    def residuals(x: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(x).tolist(), strict=True))
        return np.log1p(errors(rows, start.with_values(values)))

    x = least_squares(residuals, np.log(list(start.as_dict().values())), steps)
    return start.with_values(dict(zip(names, np.exp(x).tolist(), strict=True)))


def least_squares(
    residuals: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    steps: int,
    pull: float = 1e-2,
    to: np.ndarray | None = None,
) -> np.ndarray:
    """Levenberg and Marquardt's method with difference quotients. A residual is added for each parameter: the
    square root of `pull` times its distance from `to`, by default from the start."""
    start, damping = x.copy() if to is None else to, 1e-2

    def full(at: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(at), math.sqrt(pull) * (at - start)])

    now = full(x)
    for _ in range(steps):
        slope = np.stack([(full(x + 0.02 * unit) - now) / 0.02 for unit in np.eye(len(x))], axis=1)
        square = slope.T @ slope
        for _ in range(6):
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slope.T @ now)
            tried = full(x + np.clip(move, -0.5, 0.5))
            if tried @ tried < now @ now:
                break
            damping *= 4
        else:
            break
        x, gain, now = x + np.clip(move, -0.5, 0.5), 1 - (tried @ tried) / (now @ now), tried
        damping /= 3
        if gain < 1e-4:
            break
    return x
