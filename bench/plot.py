"""Draws the PNG: bandwidth against tokens, one line per system, and the time of each step as stacked bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.cases import OPS
from bench.report import PAIR, Record
from bench.systems import label_of

# Fields that a label shows only if the records differ in them.
DISTINCTIONS = {
    "hidden": "H={}",
    "topk": "top-{}",
    "experts": "of {}",
    "domains": "{} domain(s)",
    "routing": "{}",
    "form": "{}",
    "link_gbytes_per_s": "{:g} GB/s link",
    "num_sms": "{} SMs",
    "stage_sms": "{} SMs for staging",
}
INCHES_PER_BAR = 0.14


def write_png(records: Sequence[Record], path: Path) -> None:
    """Systems that did not run are left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves, stacks = curves_of(records), stacks_of(records)
    height = max(6.0, INCHES_PER_BAR * len(stacks))
    figure, (lines, bars) = plt.subplots(1, 2, figsize=(15, height))
    _draw_curves(lines, curves)
    _draw_stacks(bars, stacks)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves_of(records: Sequence[Record]) -> dict[str, list[tuple[int, float]]]:
    """(tokens, logical GB/s) of dispatch + combine by label, in ascending order."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for label, record in _labelled(records):
        if record["op"] == PAIR:
            rate = record["logical_bytes"] / record["median_us"] / 1e3
            curves.setdefault(label, []).append((record["tokens"], rate))
    return {label: sorted(points) for label, points in curves.items()}


def stacks_of(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Microseconds of each step, by label and tokens. Where no step is counted: of the whole operation."""
    stacks: dict[str, dict[str, float]] = {}
    for label, record in _labelled(records):
        if record["op"] not in OPS:
            continue
        stack = stacks.setdefault(f"{label}, T={record['tokens']}", {})
        for name, value in (record["steps_us"] or {record["op"]: record["median_us"]}).items():
            stack[name] = stack.get(name, 0.0) + value
    return stacks


def _labelled(records: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """What ran, with labels. A peer that always sends BF16 is drawn once, as it was measured first."""
    ran = [record for record in records if not record["not_run"]]
    varying = [name for name in DISTINCTIONS if _varies(ran, name)]
    drawn = set()
    for record in ran:
        notes = [DISTINCTIONS[name].format(record[name]) for name in varying if record[name]]
        label = ", ".join([label_of(record["system"], record["layout"], record["dtype"]), *notes])
        point = (label, record["tokens"], record["op"])
        if point not in drawn:
            drawn.add(point)
            yield label, record


def _varies(ran: Sequence[Record], name: str) -> bool:
    """Whether the records differ in a field. The 0 of peers without a limit of SMs is not a difference.

    Two values of one system always are.
    """
    values: dict[str, set[Any]] = {}
    for record in ran:
        label = label_of(record["system"], record["layout"], record["dtype"])
        values.setdefault(label, set()).add(record[name])
    return len(set().union(*values.values()) - {0}) > 1 or any(len(found) > 1 for found in values.values())


def _draw_curves(axes: Any, curves: dict[str, list[tuple[int, float]]]) -> None:
    for number, (label, points) in enumerate(curves.items()):
        # After ten lines the colours repeat, with another style of line.
        line = ("o-", "s--", "^:", "v-.")[number // 10 % 4]
        axes.plot(*zip(*points, strict=True), line, label=label, color=f"C{number % 10}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel(f"{PAIR}: logical GB/s of the busiest rank")
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(fontsize=7)


def _draw_stacks(axes: Any, stacks: dict[str, dict[str, float]]) -> None:
    left = dict.fromkeys(stacks, 0.0)
    for part in dict.fromkeys(name for stack in stacks.values() for name in stack):
        widths = [stack.get(part, 0.0) / 1e3 for stack in stacks.values()]
        axes.barh(list(stacks), widths, left=list(left.values()), label=part)
        left = {name: at + width for (name, at), width in zip(left.items(), widths, strict=True)}
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("ms; steps that run side by side add up to more than the operation takes")
    if stacks:
        axes.legend(fontsize=7)
