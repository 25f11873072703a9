"""Fits rates to measured operations, and says how well they predict others.

Which rows are used, and which of them are fitted, is written here before any error is known: FILES,
`_refusal`, `_FITTED`. A fit minimises squared logarithms of predicted / measured time, with one set of
kernels' rates for all rows. A *host*, that of a file, has one rate besides: how long it takes behind the
counts of a new plan. No rate belongs to a row or a size.
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
from uccl_ep_train.planner.protocol import TOKEN_BLOCK, Protocol, protocol_of
from uccl_ep_train.planner.shape import Router, Shape

FILES = {
    "h200_x2_house.json": ("4a56ab2", "newest with 2 GPUs in one domain whose combines are those of more"),
    "h200_x4_windows.json": ("d95cead", "newest commit with 4 GPUs in one domain and 512 MiB, hidden 7168"),
    "h200_x4_hidden_2048.json": ("18aa3cd", "newest commit with 4 GPUs in one domain, hidden 2048"),
    "h200_x2_two_domains.json": ("bcf5232", "newest commit with H200 as 2 x 1 and few tokens"),
    "h100_x2_two_domains.json": ("8a90ee1", "only commit with H100 as 2 x 1 on a link of 50 GB/s"),
    "h200_x4_two_domains.json": ("4a56ab2", "newest commit as 2 x 2 and few tokens"),
    "h200_x4_four_domains.json": ("4a56ab2", "newest commit as 4 x 1 and few tokens"),
    "h200_x4_window_budgets.json": (
        "555679d",
        "newest commit of all layouts with many tokens and less memory",
    ),
}
"""Of bench/results: the commit whose rows are used, and why. Other files are of earlier commits: of these
shapes, of hidden 4096 (8 cached rows: mean 7.6 %, largest 22 %), of 64 SMs (12: 14 %, 34 %). Newer
ones, of 4 x H100 and of combines that fold first on 2 GPUs (4e76701), take no part."""
OLD_HOST_PATH = ("bcf5232", "8a90ee1")
"""Before d556fca, which replaced what the host does behind the counts of a new plan."""
KERNEL_PER_WINDOW = ("bcf5232", "8a90ee1", "4a56ab2", "18aa3cd")
"""Before d95cead, since when all windows are one kernel: rows of several windows are not used."""
USUAL_MIB = 512  # of memory, where a record does not say
PLAN_OF = {"uncached": "new", "sync_free": "sync_free", "cached_plan": "cached"}
HOSTS = {
    "h200_x2_house.json": 20.02,
    "h200_x4_windows.json": 68.66,
    "h200_x4_hidden_2048.json": 16.32,
    "h200_x4_two_domains.json": 50.22,
    "h200_x4_four_domains.json": 63.4,
}
"""Of files with new plans of few tokens: `Machine.host_us` of the host that they were measured on, fitted. It
differs between jobs, too: see `jobs`."""
JOBS = "h200_x4_new_plan_jobs.json"
"""New plans of 128 tokens at 555679d, each in three jobs of one machine, on 2 and on 4 GPUs."""


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
    dispatch_turn_us=8.0,
    combine_turn_us=15.0,
    member_us=4.0,
    link_share=0.95,
    hop_us=24.0,
    relay_us=15.0,
)
HOSTS_START = dict.fromkeys(HOSTS, 40.0)
"""What a fit starts from and is weakly drawn to: read off the kernels' sources and the same measurements."""


@dataclass(frozen=True)
class Row:
    """A measured operation. us: median over runs of the slowest rank. spread: p90 - p10 over the median.
    windows: as counted; 0: they were not, and are those of today's layout."""

    file: str
    commit: str
    hardware: str
    shape: Shape
    op: str
    plan: str
    link_gbps: float
    us: float
    spread: float
    budget_mib: int
    windows: int = 0

    @property
    def kind(self) -> str:
        rows = "codes" if self.shape.codes else self.shape.dtype
        return f"{len(self.shape.domains)} x {self.shape.domains[0]} {self.op} {rows} {self.plan}"

    def __str__(self) -> str:
        memory = "" if self.budget_mib == USUAL_MIB else f" in {self.budget_mib} MiB"
        return f"{self.kind} T={self.shape.tokens} H={self.shape.hidden}{memory} ({self.file}, {self.commit})"

    @property
    def protocol(self) -> Protocol:
        return _in_windows(_protocol(self.shape, self.budget_mib), self.shape.tokens, self.windows)

    @property
    def num_windows(self) -> int:
        return len(self.protocol.windows(self.op, self.shape.tokens))


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
        if commit in KERNEL_PER_WINDOW:
            rows = [row for row in rows if row.num_windows == 1]
        found += {str(row): row for row in rows}.values()  # of the same case twice: the later
    return found


def jobs(results: Path) -> dict[str, list[Row]]:
    """By case: the same operation in several jobs of one machine. Raises InputError as `measured` does."""
    try:
        records = json.loads((results / JOBS).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{results / JOBS} cannot be read: {error}") from None
    found: dict[str, list[Row]] = {}
    for record in records:
        if not _refusal(record) and record["op"] == "dispatch":
            row = _row(JOBS, record)
            found.setdefault(row.kind, []).append(row)
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
        record["median_us"], record.get("budget_mib", USUAL_MIB), record.get("windows") or 0,
    )  # fmt: skip


_FITTED: Mapping[str, Sequence[tuple[str, int]]] = {
    # file: (Row.kind, tokens)
    "h200_x2_house.json": [
        ("1 x 2 dispatch bf16 cached", 128),
        ("1 x 2 dispatch bf16 cached", 4096),
        ("1 x 2 dispatch fp8 cached", 4096),
        ("1 x 2 dispatch codes cached", 4096),
        ("1 x 2 dispatch bf16 sync_free", 128),
        ("1 x 2 dispatch bf16 sync_free", 4096),
        ("1 x 2 dispatch bf16 new", 128),
        ("1 x 2 combine bf16 cached", 128),
        ("1 x 2 combine bf16 cached", 4096),
    ],
    "h200_x4_windows.json": [
        ("1 x 4 dispatch fp8 cached", 4096),
        ("1 x 4 dispatch codes cached", 4096),
        ("1 x 4 dispatch codes new", 128),
    ],
    "h200_x4_hidden_2048.json": [
        ("1 x 4 dispatch bf16 cached", 128),
        ("1 x 4 dispatch bf16 new", 128),
        ("1 x 4 dispatch codes new", 128),
        ("1 x 4 combine bf16 cached", 128),
        ("1 x 4 combine bf16 cached", 4096),
    ],
    "h200_x2_two_domains.json": [
        ("2 x 1 dispatch bf16 cached", 128),
        ("2 x 1 combine bf16 cached", 128),
    ],
    "h200_x4_two_domains.json": [
        ("2 x 2 dispatch fp8 new", 128),
        ("2 x 2 combine bf16 cached", 128),
    ],
    "h200_x4_four_domains.json": [("4 x 1 dispatch fp8 new", 128)],
    "h200_x4_window_budgets.json": [
        ("1 x 4 dispatch bf16 cached", 8192),
        ("1 x 4 combine bf16 cached", 8192),
    ],
}
"""24 rows that together depend on every rate: the smallest and largest sizes. All of H100, every T = 1024,
and every window between domains are predicted only."""


def is_fitted(row: Row) -> bool:
    return (row.kind, row.shape.tokens) in _FITTED.get(row.file, ())


@lru_cache(maxsize=1024)
def _protocol(shape: Shape, budget_mib: int) -> Protocol:
    return protocol_of(shape, budget_mib << 20)


def _in_windows(sizes: Protocol, tokens: int, windows: int) -> Protocol:
    """With so many windows of tokens; 0: as it is."""
    if windows == 0:
        return sizes
    window = -(-tokens // (windows * TOKEN_BLOCK)) * TOKEN_BLOCK
    slots = max(sizes.slots, 2 * -(-window // min(sizes.chunk_rows)))
    return replace(sizes, dispatch_window=window, first_window=window, combine_window=window, slots=slots)


def predict(row: Row, kernels: Kernels, hosts: Mapping[str, float]) -> float:
    """Microseconds of the operation."""
    machine: Machine = replace(MACHINES["h200"], kernels=kernels)
    machine = replace(machine, host_us=hosts.get(row.file, machine.host_us))
    if row.link_gbps:
        machine = replace(machine, nic_gbps=row.link_gbps)
    return simulate(machine, row.shape, row.protocol, row.op, row.plan).us


def errors(rows: Sequence[Row], kernels: Kernels, hosts: Mapping[str, float] = HOSTS) -> np.ndarray:
    """Predicted / measured - 1 of each row."""
    return np.array([predict(row, kernels, hosts) / row.us - 1 for row in rows])


def fit(
    rows: Sequence[Row], start: Kernels = START, hosts: Mapping[str, float] = HOSTS_START, steps: int = 60
) -> tuple[Kernels, dict[str, float]]:
    """The rates with the least squared logarithms of predicted / measured: of kernels and of hosts."""
    names, files = list(start.as_dict()), list(hosts)

    def unpack(x: np.ndarray) -> tuple[Kernels, dict[str, float]]:
        values = np.exp(x).tolist()
        return (
            start.with_values(dict(zip(names, values, strict=False))),
            dict(zip(files, values[len(names) :], strict=True)),
        )

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.log1p(errors(rows, *unpack(x)))

    first = np.log([*start.as_dict().values(), *hosts.values()])
    return unpack(least_squares(residuals, first, steps))


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
