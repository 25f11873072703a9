"""Output: a table and progress on the terminal, and a list of records as JSON."""

from __future__ import annotations

import argparse
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

from bench.cases import BACKWARD, OPS, Case, exchanges
from bench.measure import Measured
from bench.systems import label_of
from uccl_ep_train.settings import env

PAIR = "dispatch+combine"
OURS = "uccl_ep"
Record = dict[str, Any]


def records_of(
    case: Case, measured: Sequence[Measured], refused: dict[str, str], about: Record
) -> list[Record]:
    """One record per system and operation, and one per refused system. `PAIR` sums `OPS` run by run."""
    found = []
    for entry in measured:
        of_system = entry.system.ops
        for op in (*of_system[:2], PAIR, *of_system[2:]) if of_system[:2] == OPS else of_system:
            ops = OPS if op == PAIR else (op,)
            wall = sum_over(entry.wall_us, ops)
            steps = {
                name: sum(entry.steps_us[o].get(name, 0.0) for o in ops)
                for name in dict.fromkeys(step for o in ops for step in entry.steps_us[o])
            }
            found.append(
                _record(case, about)
                | {
                    "system": entry.system.name,
                    "mode": entry.system.mode,
                    "op": op,
                    "dtype": entry.system.dtype,
                    "layout": entry.system.layout,
                    "num_sms": entry.system.num_sms,
                    "stage_sms": entry.system.stage_sms,
                    "end_to_end": entry.system.end_to_end,
                    "runs": wall.numel(),
                    "median_us": quantile(wall, 0.5),
                    "p10_us": quantile(wall, 0.1),
                    "p90_us": quantile(wall, 0.9),
                    "cpu_us": quantile(sum_over(entry.cpu_us, ops), 0.5),
                    "wire_bytes": sum(entry.wire_bytes[o] for o in ops),
                    "link_bytes": sum(entry.link_bytes[o] for o in ops),
                    "logical_bytes": entry.logical_bytes * sum(len(exchanges(o, case.dtype)) for o in ops),
                    "windows": sum(entry.windows[o] for o in ops),
                    "steps_us": {name: round(value, 1) for name, value in steps.items()},
                }
            )
    return found + [
        _record(case, about) | {"system": label.split()[0], "op": PAIR, "not_run": reason}
        for label, reason in refused.items()
    ]


def _record(case: Case, about: Record) -> Record:
    """All fields in the order of the file, with the values of a system that did not run."""
    unknown = dict.fromkeys(("median_us", "p10_us", "p90_us", "cpu_us", "wire_bytes", "link_bytes"))
    return {
        "system": "all",
        "mode": None,
        "op": PAIR,
        "dtype": case.dtype,
        "layout": None,
        **asdict(case),
        "trace": Path(case.trace).name,
        "end_to_end": None,
        "runs": 0,
        **unknown,
        "logical_bytes": None,
        "windows": None,
        "steps_us": {},
        "not_run": "",
        **about,
    }


def about_here(commit_option: str) -> Record:
    return {"commit": commit(commit_option), "hardware": hardware()}


def sum_over(of_op: dict[str, torch.Tensor], ops: Sequence[str]) -> torch.Tensor:
    return torch.stack([of_op[op] for op in ops]).sum(0)


def quantile(values: torch.Tensor, share: float) -> float:
    return round(float(values.quantile(share)), 1)


def paired_ratios(measured: Sequence[Measured]) -> list[str]:
    """Lines with each peer's time divided by ours: the ratio within a run, as quantiles over the runs."""
    lines = []
    for ours in measured:
        for peer in measured:
            if not ours.system.name.startswith(OURS) or peer.system.name.startswith(OURS):
                continue
            for op, parts in ((PAIR, OPS), (BACKWARD, (BACKWARD,))):
                if not set(parts) <= set(ours.system.ops) & set(peer.system.ops):
                    continue
                ratio = sum_over(peer.wall_us, parts) / sum_over(ours.wall_us, parts)
                low, middle, high = (float(ratio.quantile(q)) for q in (0.1, 0.5, 0.9))
                lines.append(
                    f"  {op} of {ours.system.label}: {middle:.2f} x as fast as {peer.system.label} "
                    f"(p10 {low:.2f}, p90 {high:.2f}, same run)"
                )
    return lines


def table(records: Sequence[Record]) -> str:
    """One line per record of one case; then the systems that did not run."""
    head = ("system", "op", "median us", "p10", "p90", "cpu us", "wire MB", "logical MB", "GB/s", "wire GB/s")
    rows = [head]
    for record in records:
        if record["not_run"]:
            continue
        seconds = record["median_us"] * 1e-6
        rows.append(
            (
                label_of(record["system"], record["layout"], record["dtype"]),
                record["op"],
                *(f"{record[name]:,.0f}" for name in ("median_us", "p10_us", "p90_us", "cpu_us")),
                f"{record['wire_bytes'] / 1e6:.2f}",
                f"{record['logical_bytes'] / 1e6:.2f}",
                f"{record['logical_bytes'] / seconds / 1e9:.2f}",
                f"{record['wire_bytes'] / seconds / 1e9:.2f}",
            )
        )
    refused = [f"{record['system']}  not run: {record['not_run']}" for record in records if record["not_run"]]
    return "\n".join([*(aligned(rows) if len(rows) > 1 else ()), *refused])


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def steps_table(records: Sequence[Record]) -> str:
    """Microseconds of each step, where a system counts them."""
    lines = []
    for record in records:
        if record["steps_us"] and record["op"] in OPS:
            steps = ", ".join(f"{name} {value:,.0f}" for name, value in record["steps_us"].items())
            label = label_of(record["system"], record["layout"], record["dtype"])
            lines.append(f"  steps of {record['op']}, {label}, us of the slowest rank: {steps}")
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


def write_results(records: Sequence[Record], args: argparse.Namespace) -> None:
    """To `args.out`, with what is known of the machine and of `args.commit`."""
    about = about_here(args.commit)
    write_json([record | about for record in records], Path(f"{args.out}.json"))
    print(f"written: {args.out}.json")


def commit(given: str = "") -> str:
    """The commit to record: the given one, else BENCH_COMMIT, else that of this checkout, else "unknown".

    BENCH_COMMIT is for copies whose git does not describe the code that runs. The commit of this checkout
    gets "-dirty" if tracked files other than results differ.
    """
    named = given or env.read("BENCH_COMMIT")
    if named:
        return named
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
    """CPU model, cores, GPUs, whether ranks share them, and torch's version; not the host's name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    gpus = "no GPU"
    if torch.cuda.is_available():
        count, ranks = torch.cuda.device_count(), int(env.read("LOCAL_WORLD_SIZE", "1"))
        gpus = f"{count} x {torch.cuda.get_device_name()}" + (
            f" shared by {ranks} ranks" if ranks > count else ""
        )
    return f"{model}, {len(models) or '?'} cores, {gpus}, torch {torch.__version__}"
