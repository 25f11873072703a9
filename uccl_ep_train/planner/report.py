"""Predictions as text, tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uccl_ep_train.core import cuda
from uccl_ep_train.errors import EpError
from uccl_ep_train.planner import protocol
from uccl_ep_train.planner.events import simulate
from uccl_ep_train.planner.machine import Machine
from uccl_ep_train.planner.ports import Outcome
from uccl_ep_train.planner.protocol import Protocol
from uccl_ep_train.planner.shape import Bytes, Shape, spread, stock_bytes

MEASURED_RANKS = 4
"""Of the largest group whose operations were measured; times of larger ones are extrapolated."""
LITTLE_MB = 16
"""Rows that a rank sends to other domains in two windows. With less, operations took up to 2.3 times as long
as predicted: bench/results/h200_x1_domain_windows.json."""


@dataclass(frozen=True)
class Prediction:
    """dispatch has a new plan whose counts the host reads; so does the stock all-to-all."""

    machine: Machine
    shape: Shape
    protocol: Protocol
    dispatch: Outcome
    combine: Outcome

    @property
    def stock_us(self) -> float:
        """Of Megatron's all-to-all one way: its bytes at full rates, and nothing else."""
        return wire_us(stock_bytes(self.shape), self.machine)

    def sent(self, op: str) -> Bytes:
        """What leaves a rank on average, weights of pairs included. Of a drawn or traced routing: as if
        uniform."""
        shape = self.shape
        row = shape.row_bytes(shape.dtype if op == "dispatch" else "bf16")
        return spread(shape.router, shape.domains).bytes(shape.tokens, row, 4 if op == "dispatch" else 0)

    @property
    def floor_us(self) -> dict[str, float]:
        """Of each operation: its bytes at full rates."""
        return {op: wire_us(self.sent(op), self.machine) for op in ("dispatch", "combine")}


def wire_us(sent: Bytes, machine: Machine) -> float:
    """Microseconds of the slower of two networks that work at the same time."""
    return 1e6 * max(sent.link / machine.link_bytes_per_s, sent.nic / machine.nic_bytes_per_s)


def predict(
    machine: Machine, shape: Shape, budget_bytes: int = 512 << 20, window_tokens: int | None = None
) -> Prediction:
    """Raises what creating such a buffer raises. Without CUDA kernels in the extension, windows are not
    known, and it is taken to need none."""
    sizes = sizes_of(shape, budget_bytes, window_tokens)
    return Prediction(
        machine,
        shape,
        sizes,
        simulate(machine, shape, sizes, "dispatch", "new"),
        simulate(machine, shape, sizes, "combine"),
    )


def sizes_of(shape: Shape, budget_bytes: int, window_tokens: int | None) -> Protocol:
    """The native layout's where the extension has CUDA kernels, else those of one window."""
    if not cuda.built():
        return protocol.unlimited(shape)
    return protocol.protocol_of(shape, budget_bytes, window_tokens)


BUSY = {
    "stage": "SMs that stage",
    "proxy": "proxy",
    "nic out": "NIC, sending",
    "nic in": "NIC, receiving",
    "nvlink": "NVLink",
    "place": "SMs that place",
    "fold": "SMs that fold",
    "merge": "SMs that merge",
    "latency": "nothing: latencies",
}
"""What a reader is told of `Outcome.binds`."""


def lines(found: Prediction) -> list[str]:
    """A report of a prediction."""
    shape, memory = found.shape, found.protocol.memory
    each = " and ".join(str(size) for size in sorted(set(shape.domains), reverse=True))
    about = [
        f"one dispatch and one combine, predicted: group of {shape.num_ranks} ranks in "
        f"{len(shape.domains)} domains of {each}, {shape.tokens} tokens a rank, top-{shape.router.topk} of "
        f"{shape.router.num_experts}, hidden {shape.hidden}, {shape.dtype} dispatch with a new plan",
        f"  {'':8s} {'time':>9s}  {'windows':>7s}  {'bytes alone':>11s}  {'stock alltoall':>14s}  what binds",
    ]
    for op, outcome in (("dispatch", found.dispatch), ("combine", found.combine)):
        name, us = outcome.binds
        about.append(
            f"  {op:8s} {_us(outcome.us):>9s}  {outcome.num_windows:7d}  {_us(found.floor_us[op]):>11s}  "
            f"{_us(found.stock_us):>14s}  {BUSY[name]}, for {_us(us)} ({us / outcome.us:.0%})"
        )
    about.append(
        "  bytes alone, stock alltoall: what would go by the slower network, at full rate without waits"
    )
    if memory is None:
        about.append("  buffer and windows: not known, the extension was built without CUDA kernels")
    else:
        total, least, budget = (
            f"{size / 2**20:,.0f}"
            for size in (memory.total_bytes, memory.least_budget_bytes, memory.budget_bytes)
        )
        about.append(f"  buffer: {total} MiB; allowed {budget}, at least {least}; more memory, fewer windows")
        if found.protocol.stream_batches > 1:
            windows = f"{found.protocol.stream_batches} windows for the same tokens"
            about.append(f"  too little for all at once: a combine takes {windows}, each for some domains")
    return [*about, *caveats(found)]


def _us(us: float) -> str:
    return f"{us:,.0f} µs"


def caveats(found: Prediction) -> list[str]:
    """What a reader has to know of the times."""
    machine, shape = found.machine, found.shape
    about = [
        f"  domain: {machine.link}; {machine.link_gbps:.0f} GB/s",
        f"  NIC: {machine.nic}; {machine.nic_gbps:.0f} GB/s, never measured",
    ]
    if max(shape.domains) > machine.gpus:
        about.append(
            f"  a node of {machine.name} has {machine.gpus} GPUs: domains of {max(shape.domains)} are taken "
            "to have its link"
        )
    if len(set(shape.domains)) > 1:
        about.append(
            f"  domains differ: ranks of that with {min(shape.domains)} pass on rows of several ranks of the "
            "others, so they bind; bytes alone are a rank's on average"
        )
    if shape.skew > 0 or shape.trace is not None:
        about.append("  bytes and the stock alltoall are those of even routing; times are not")
    if not machine.measured:
        about.append(f"  rates of {machine.name} are its vendor's: times are lower bounds")
    for op, outcome in (("dispatch", found.dispatch), ("combine", found.combine)):
        under_way = 2e-6 * found.sent(op).nic / outcome.num_windows
        if outcome.num_windows > 1 and 0 < under_way < LITTLE_MB:
            about.append(
                f"  two windows of a {op} send {under_way:.1f} MB to other domains: below {LITTLE_MB} MB its "
                "time is a lower bound, and more memory helps"
            )
    if shape.num_ranks > MEASURED_RANKS:
        about.append(
            f"  groups of more than {MEASURED_RANKS} ranks were not measured: times are extrapolated"
        )
    return about


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep. refused: why it cannot be laid out; then found is None."""

    ranks: int
    domain_size: int
    found: Prediction | None
    refused: str = ""


def sweep(
    machine: Machine,
    shape_of: Callable[[int, int], Shape],
    ranks: Iterable[int],
    domain_sizes: Sequence[int],
    budget_bytes: int,
    window_tokens: int | None,
) -> Iterator[Cell]:
    """Groups of all these sizes, each as soon as it is known: one domain where a group has fewer ranks.

    shape_of  of so many ranks in domains of such a size. What it refuses, or cannot be laid out, becomes a
              refusal
    """
    for num in ranks:
        for size in dict.fromkeys(min(max(num, 1), size) for size in domain_sizes):
            try:
                found = predict(machine, shape_of(num, size), budget_bytes, window_tokens)
                yield Cell(num, size, found)
            except EpError as error:
                yield Cell(num, size, None, str(error))


_HEAD = (
    "ranks",
    "domain",
    "MiB",
    "windows",
    "dispatch µs",
    "combine µs",
    "stock µs",
    "x stock",
    "NIC MB",
    "dispatch: what binds",
    "combine: what binds",
)
_LEFT = 9  # columns from here on begin at the left


def table(cells: Sequence[Cell]) -> str:
    """A line for each cell. windows: of dispatch and of combine; NIC MB: of combine; stock: the bytes of the
    stock alltoall, one way; x stock: both ways of it by dispatch and combine."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for cell in cells:
        start = (str(cell.ranks), str(cell.domain_size))
        found = cell.found
        if found is None:
            rows.append((*start, cell.refused))
            continue
        memory, both = found.protocol.memory, found.dispatch.us + found.combine.us
        rows.append(
            (
                *start,
                f"{memory.total_bytes / 2**20:.0f}" if memory else "-",
                f"{found.dispatch.num_windows}, {found.combine.num_windows}",
                f"{found.dispatch.us:,.0f}",
                f"{found.combine.us:,.0f}",
                f"{found.stock_us:,.0f}",
                f"{2 * found.stock_us / both:.2f}",
                f"{found.sent('combine').nic / 1e6:.0f}",
                BUSY[found.dispatch.binds[0]],
                BUSY[found.combine.binds[0]],
            )
        )
    full = [row for row in rows if len(row) == len(_HEAD)]
    widths = [max(len(row[i]) for row in full) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            word
            if len(row) < len(_HEAD) and i == 2
            else word.ljust(width)
            if i >= _LEFT
            else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    )


def draw_ports(found: Prediction, path: Path) -> None:
    """A PNG of how long each port is busy in both operations. Needs matplotlib."""
    figure, axes, plt = _figure()
    for at, (op, outcome) in enumerate((("dispatch", found.dispatch), ("combine", found.combine))):
        names = list(outcome.busy_us)
        axes.barh([f"{op}: {BUSY[n]}" for n in names], [outcome.busy_us[n] for n in names], color=f"C{at}")
        axes.axvline(outcome.us, color=f"C{at}", linestyle="--", label=f"{op}: {_us(outcome.us)}")
    axes.axvline(found.stock_us, color="grey", linestyle=":", label="the stock all-to-all's bytes")
    axes.set_xlabel("µs that a resource is busy; dashed: the whole operation")
    axes.set_title(f"predicted: {found.shape.num_ranks} ranks in {len(found.shape.domains)} domains")
    axes.invert_yaxis()
    _save(figure, axes, plt, path)


def draw_sweep(cells: Sequence[Cell], path: Path) -> None:
    """A PNG of both times over the number of ranks, a line for each size of domain. Needs matplotlib."""
    figure, axes, plt = _figure()
    there = [(c.ranks, c.domain_size, c.found) for c in cells if c.found is not None]
    for number, size in enumerate(dict.fromkeys(s for _, s, _ in there)):
        points = [(ranks, found) for ranks, s, found in there if s == size]
        xs = [ranks for ranks, _ in points]
        axes.plot(
            xs,
            [f.dispatch.us for _, f in points],
            "o-",
            color=f"C{number}",
            label=f"dispatch, domains of {size}",
        )
        axes.plot(
            xs,
            [f.combine.us for _, f in points],
            "s--",
            color=f"C{number}",
            label=f"combine, domains of {size}",
        )
        axes.plot(
            xs,
            [f.stock_us for _, f in points],
            ":",
            color=f"C{number}",
            label=f"stock bytes, domains of {size}",
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({ranks for ranks, _, _ in there})
    axes.set_xticks(ticks, labels=[str(ranks) for ranks in ticks])
    axes.set_title("predicted; stock: the bytes of the stock alltoall at full rate")
    axes.set_xlabel("ranks")
    axes.set_ylabel("µs")
    axes.grid(alpha=0.3)
    _save(figure, axes, plt, path)


def _figure() -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    return figure, axes, plt


def _save(figure: Any, axes: Any, plt: Any, path: Path) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
