"""What comes out: a table and progress on the terminal, a list of records as JSON, and a PNG."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.cases import Case
from bench.measure import Measured
from bench.systems import OPS

PAIR = "dispatch+combine"
OURS = "uccl_ep"
Record = dict[str, Any]


def records_of(case: Case, measured: Sequence[Measured]) -> list[Record]:
    """One record per system and operation; `PAIR` is the sum of both, run by run."""
    about = {"commit": commit(), "hardware": hardware()}
    found = []
    for entry in measured:
        for op in (*OPS, PAIR):
            ops = OPS if op == PAIR else (op,)
            index = [OPS.index(name) for name in ops]
            wall = entry.wall_us[index].sum(0)
            steps = {
                name: sum(entry.steps_us[o].get(name, 0.0) for o in ops)
                for name in dict.fromkeys(step for o in ops for step in entry.steps_us[o])
            }
            found.append(
                {
                    "system": entry.system.name,
                    "mode": entry.system.mode,
                    "op": op,
                    "dtype": entry.system.dtype,
                    "layout": entry.system.layout,
                    **{name: value for name, value in asdict(case).items() if name != "dtype"},
                    "num_sms": entry.system.num_sms,
                    "end_to_end": entry.system.end_to_end,
                    "runs": wall.numel(),
                    "median_us": quantile(wall, 0.5),
                    "p10_us": quantile(wall, 0.1),
                    "p90_us": quantile(wall, 0.9),
                    "cpu_us": quantile(entry.cpu_us[index].sum(0), 0.5),
                    "wire_bytes": sum(entry.wire_bytes[o] for o in ops),
                    "link_bytes": sum(entry.link_bytes[o] for o in ops),
                    "logical_bytes": entry.logical_bytes * len(ops),
                    "steps_us": {name: round(value, 1) for name, value in steps.items()},
                    **about,
                }
            )
    return found


def quantile(values: torch.Tensor, share: float) -> float:
    return round(float(values.quantile(share)), 1)


def paired_ratios(measured: Sequence[Measured]) -> list[str]:
    """How often our time fits into each peer's: quantiles over runs of the ratio inside one run."""
    lines = []
    for ours in measured:
        if ours.system.name != OURS:
            continue
        for peer in measured:
            if peer.system.name == OURS:
                continue
            ratio = peer.wall_us.sum(0) / ours.wall_us.sum(0)
            low, middle, high = (float(ratio.quantile(q)) for q in (0.1, 0.5, 0.9))
            lines.append(
                f"  {PAIR} of {ours.system.label}: {middle:.2f} x as fast as {peer.system.label} "
                f"(p10 {low:.2f}, p90 {high:.2f}, same run)"
            )
    return lines


def table(records: Sequence[Record]) -> str:
    """One line per record of one case."""
    head = ("system", "op", "median us", "p10", "p90", "cpu us", "wire MB", "logical MB", "GB/s", "wire GB/s")
    rows = [head]
    for record in records:
        label = record["system"] + ("" if record["mode"] == "uncached" else f" ({record['mode']})")
        seconds = record["median_us"] * 1e-6
        rows.append(
            (
                f"{label} {record['dtype']}",
                record["op"],
                *(f"{record[name]:,.0f}" for name in ("median_us", "p10_us", "p90_us", "cpu_us")),
                f"{record['wire_bytes'] / 1e6:.2f}",
                f"{record['logical_bytes'] / 1e6:.2f}",
                f"{record['logical_bytes'] / seconds / 1e9:.2f}",
                f"{record['wire_bytes'] / seconds / 1e9:.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def steps_table(records: Sequence[Record]) -> str:
    """Microseconds of each step, where a system counts them."""
    lines = []
    for record in records:
        if record["steps_us"] and record["op"] != PAIR:
            steps = ", ".join(f"{name} {value:,.0f}" for name, value in record["steps_us"].items())
            lines.append(f"  steps of {record['op']} ({record['mode']}), us of the slowest rank: {steps}")
    return "\n".join(lines)


class Progress:
    """A bar on a terminal, nothing elsewhere. Rank 0 only."""

    def __init__(self, what: str, *, active: bool) -> None:
        self._what = what
        self._active = active and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if not self._active:
            return
        width = 24
        bar = "#" * (width * done // total)
        line = f"[{bar:<{width}}] {done}/{total} {self._what}"[: shutil.get_terminal_size().columns - 1]
        end = "\r\033[K" if done == total else ""
        print(f"\r{line}\033[K{end}", end="", file=sys.stderr, flush=True)


def write_json(records: Sequence[Record], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")


def write_png(records: Sequence[Record], path: Path) -> None:
    """Left: bandwidth against tokens, a line per system. Right: time of each part as stacked bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (lines, bars) = plt.subplots(1, 2, figsize=(15, 6))
    curves: dict[str, list[tuple[int, float]]] = {}
    stacks: dict[str, dict[str, float]] = {}
    for record in records:
        label = _curve_label(record)
        if record["op"] == PAIR:
            rate = record["logical_bytes"] / record["median_us"] / 1e3
            curves.setdefault(label, []).append((record["tokens"], rate))
        else:
            parts = record["steps_us"] or {record["op"]: record["median_us"]}
            for name, value in parts.items():
                stack = stacks.setdefault(f"{label}, T={record['tokens']}", {})
                stack[name] = stack.get(name, 0.0) + value
    for label, points in curves.items():
        lines.plot(*zip(*sorted(points), strict=True), "o-", label=label)
    lines.set_xscale("log", base=2)
    lines.set_xlabel("tokens per rank")
    lines.set_ylabel(f"{PAIR}: logical GB/s of the busiest rank")
    lines.grid(alpha=0.3)
    lines.legend(fontsize=7)
    left = dict.fromkeys(stacks, 0.0)
    for part in dict.fromkeys(name for stack in stacks.values() for name in stack):
        widths = [stack.get(part, 0.0) / 1e3 for stack in stacks.values()]
        bars.barh(list(stacks), widths, left=list(left.values()), label=part)
        left = {name: at + width for (name, at), width in zip(left.items(), widths, strict=True)}
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=6)
    bars.set_xlabel("ms")
    bars.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curve_label(record: Record) -> str:
    mode = "" if record["mode"] == "uncached" else f" {record['mode']}"
    return f"{record['system']}{mode} {record['dtype']}, {record['domains']} domain(s), {record['routing']}"


def commit() -> str:
    """Of this checkout, with "-dirty" if tracked files except results differ; "unknown" outside of one."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)results")
        return head + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def hardware() -> str:
    """CPU model, cores, GPUs and torch of this host; no name of it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    gpus = "no GPU"
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{model}, {len(models) or '?'} cores, {gpus}, torch {torch.__version__}"
