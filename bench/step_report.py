"""Records, table, claims and PNG of `megatron_step.py`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.flops import peak_flops
from bench.report import Record, aligned, quantile
from bench.step_cases import IDEAL, OURS, STOCK, Cell, architecture

# With at most two experts per token, the order of a sum of BF16 rows cannot change its bits.
_MAX_TOPK_OF_EQUAL_BITS = 2
_VERSIONS = ("megatron-core", "transformer-engine")


@dataclass(frozen=True)
class Trained:
    """All counted steps of one dispatcher on all ranks.

    losses_RN                [rank][step], warm-up included
    wall_ms                  [step] of the slowest rank
    cpu_ms                   [step] of all ranks together
    dispatch_ms, combine_ms  [step] mean over the ranks
    waiting_ms               [step] part of these two until the last rank began to move rows, mean over the
                             ranks; None: no rank waits, or the ranks went through different stages
    wire_bytes               bytes that the busiest rank exchanged with others in the first step
    gpu_busy                 share of a step in which the least busy GPU was busy; None on a CPU
    slowest_rank             the rank that was last most often
    deterministic            the same step gives the same bits
    peak_torch_bytes         peak of torch's allocator on the rank with the most, without the models of other
                             dispatchers; None on a CPU
    outside_torch_bytes      bytes that the dispatcher allocates outside torch; None: not known
    rss_bytes                resident memory of the largest process so far, with the models of all dispatchers
    """

    dispatcher: str
    losses_RN: list[list[float]]
    wall_ms: torch.Tensor
    cpu_ms: torch.Tensor
    dispatch_ms: torch.Tensor
    combine_ms: torch.Tensor
    waiting_ms: torch.Tensor | None
    wire_bytes: int
    gpu_busy: float | None
    slowest_rank: int
    deterministic: bool
    flops_per_token: float | None
    peak_torch_bytes: int | None
    outside_torch_bytes: int | None
    rss_bytes: int

    @property
    def comm_ms(self) -> torch.Tensor:
        return self.dispatch_ms + self.combine_ms

    @property
    def losses_N(self) -> list[float]:
        """Mean over the ranks."""
        return [sum(losses) / len(losses) for losses in zip(*self.losses_RN, strict=True)]


def about_versions() -> Record:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"versions": found}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def records_of(
    cell: Cell, trained: Sequence[Trained], refused: dict[str, str], about: Record
) -> list[Record]:
    """One record per dispatcher, also for those that did not run; all have the same fields."""
    stock = next((entry for entry in trained if entry.dispatcher == STOCK), None)
    peak = peak_flops(device_name(cell.recipe.device))
    link = about["link_gbytes_per_s"]
    found = [
        _record(cell, entry.dispatcher, about) | _numbers(cell, entry, stock, peak) | _split(entry, link)
        for entry in trained
    ]
    return found + [
        _record(cell, dispatcher, about) | {"not_run": reason} for dispatcher, reason in refused.items()
    ]


_NUMBERS = (
    "median_ms", "p10_ms", "p90_ms", "slowest_rank", "cpu_ms", "gpu_busy", "dispatch_ms", "combine_ms",
    "comm_share", "waiting_ms", "wire_ms", "own_ms", "wire_bytes",
    "tokens_per_s_per_rank", "model_flops_per_token", "tflops_per_rank", "peak_flops_per_rank", "mfu",
    "peak_torch_bytes", "outside_torch_bytes", "process_rss_bytes",
    "speedup", "speedup_p10", "speedup_p90", "deterministic", "equals_stock", "loss_difference", "losses",
)  # fmt: skip


def _record(cell: Cell, dispatcher: str, about: Record) -> Record:
    recipe = cell.recipe
    ours = dispatcher == OURS
    return {
        "system": dispatcher,
        "recipe": recipe.name,
        "device": recipe.device,
        "ranks": recipe.num_ranks,
        "domains": -(-recipe.num_ranks // recipe.domain_size),
        "micro_batch_tokens": cell.micro_batch_tokens,
        "tokens_per_rank": cell.tokens_per_rank,
        "sequence_length": recipe.sequence_length,
        "num_microbatches": recipe.num_microbatches,
        **architecture(recipe),
        "seed": recipe.seed,
        "dispatch_dtype": recipe.dispatch_dtype if ours else "bf16",
        "grad_dtype": recipe.grad_dtype if ours else "bf16",
        "cell_dtype": recipe.dispatch_dtype,
        "overlap": cell.overlap,
        "runs": 0,
        **dict.fromkeys(_NUMBERS),
        "not_run": "",
        **about,
    }


def _numbers(cell: Cell, entry: Trained, stock: Trained | None, peak: float | None) -> Record:
    median_ms = quantile(entry.wall_ms, 0.5)
    rate = cell.tokens_per_rank / (1e-3 * float(entry.wall_ms.quantile(0.5)))
    flops = None if entry.flops_per_token is None else rate * entry.flops_per_token
    numbers: Record = {
        "runs": entry.wall_ms.numel(),
        "median_ms": median_ms,
        "p10_ms": quantile(entry.wall_ms, 0.1),
        "p90_ms": quantile(entry.wall_ms, 0.9),
        "slowest_rank": entry.slowest_rank,
        "cpu_ms": quantile(entry.cpu_ms, 0.5),
        "dispatch_ms": quantile(entry.dispatch_ms, 0.5),
        "combine_ms": quantile(entry.combine_ms, 0.5),
        "comm_share": round(float((entry.comm_ms / entry.wall_ms).quantile(0.5)), 4),
        "tokens_per_s_per_rank": round(rate, 1),
        "model_flops_per_token": entry.flops_per_token,
        "tflops_per_rank": None if flops is None else round(flops / 1e12, 6),
        "peak_flops_per_rank": peak,
        "mfu": None if peak is None or flops is None else round(flops / peak, 4),
        "peak_torch_bytes": entry.peak_torch_bytes,
        "outside_torch_bytes": entry.outside_torch_bytes,
        "process_rss_bytes": entry.rss_bytes,
        "deterministic": entry.deterministic,
        "losses": entry.losses_N,
    }
    if stock is not None and entry is not stock:
        ratio = stock.wall_ms / entry.wall_ms
        pairs = zip(entry.losses_N, stock.losses_N, strict=True)
        numbers |= {
            "speedup": round(float(ratio.quantile(0.5)), 3),
            "speedup_p10": round(float(ratio.quantile(0.1)), 3),
            "speedup_p90": round(float(ratio.quantile(0.9)), 3),
            "equals_stock": entry.losses_RN == stock.losses_RN,
            "loss_difference": max(abs(loss / other - 1) for loss, other in pairs),
        }
    return numbers


def _split(entry: Trained, link_gbytes_per_s: float | None) -> Record:
    """The parts of dispatch and combine. wire_ms: the bytes at the link's rate; own_ms: what is left."""
    numbers: Record = {"gpu_busy": entry.gpu_busy, "wire_bytes": entry.wire_bytes}
    if entry.waiting_ms is None:
        return numbers
    numbers["waiting_ms"] = quantile(entry.waiting_ms, 0.5)
    if link_gbytes_per_s is not None:
        wire_ms = entry.wire_bytes / link_gbytes_per_s / 1e6
        numbers["wire_ms"] = round(wire_ms, 1)
        numbers["own_ms"] = quantile(entry.comm_ms - entry.waiting_ms - wire_ms, 0.5)
    return numbers


def broken_promise(record: Record) -> str:
    """What must be equal bit for bit but is not, or ""."""
    promised = (
        record["system"] == OURS
        and record["deterministic"]
        and record["dispatch_dtype"] == record["grad_dtype"] == "bf16"
        and record["topk"] <= _MAX_TOPK_OF_EQUAL_BITS
    )
    if not promised or record["equals_stock"] is not False:
        return ""
    return f"{OURS} in BF16 has other losses than {STOCK}, by up to {record['loss_difference']:.2e} of them"


def table(records: Sequence[Record]) -> str:
    """One line per dispatcher of one cell; then ratios, losses, and the dispatchers that did not run."""
    head = (
        "dispatcher", "", "median ms", "p10", "p90", "last rank", "cpu ms", "dispatch ms", "combine ms",
        "share", "waiting", "wire", "own", "GPU busy", "tokens/s/rank", "TFLOP/s", "MFU", "torch MiB",
        "beside MiB", "last loss",
    )  # fmt: skip
    rows, notes = [head], []
    for r in records:
        if r["not_run"]:
            notes.append(f"  {r['system']}  not run: {r['not_run']}")
            continue
        rows.append(
            (
                r["system"],
                r["dispatch_dtype"],
                *(f"{r[name]:,.1f}" for name in ("median_ms", "p10_ms", "p90_ms")),
                f"{r['slowest_rank']}",
                *(f"{r[name]:,.1f}" for name in ("cpu_ms", "dispatch_ms", "combine_ms")),
                f"{r['comm_share']:.0%}",
                *(_known(r[name], ",.1f") for name in ("waiting_ms", "wire_ms", "own_ms")),
                _known(r["gpu_busy"], ".0%"),
                f"{r['tokens_per_s_per_rank']:,.0f}",
                _known(r["tflops_per_rank"], ".3g"),
                _known(r["mfu"], ".1%"),
                *(_mebibytes(r[name]) for name in ("peak_torch_bytes", "outside_torch_bytes")),
                f"{r['losses'][-1]:.4f}",
            )
        )
        if r["speedup"] is not None:
            notes += [_ratio_line(r), _loss_line(r)]
    return "\n".join([*(aligned(rows) if len(rows) > 1 else ()), *notes])


def _known(value: float | None, form: str) -> str:
    return "not known" if value is None else format(value, form)


def _mebibytes(size: int | None) -> str:
    return "not known" if size is None else f"{size / 2**20:,.0f}"


def _ratio_line(r: Record) -> str:
    slower = f", SLOWER than {STOCK}" if r["speedup"] < 1 else ""
    return (
        f"  a step of {r['system']}: {r['speedup']:.2f} x as fast as {STOCK} "
        f"(p10 {r['speedup_p10']:.2f}, p90 {r['speedup_p90']:.2f}, same round){slower}"
    )


def _loss_line(r: Record) -> str:
    if r["system"] == IDEAL:
        return f"  losses of {IDEAL}: of rows that are not its own, they mean nothing"
    if r["equals_stock"]:
        return f"  losses of {r['system']}: those of {STOCK} to the last bit, on all ranks, in all steps"
    return f"  losses of {r['system']}: differ from {STOCK}'s by up to {r['loss_difference']:.2e} of them"


def label(r: Record) -> str:
    """Names a record's cell, without what all cells of a run share."""
    return (
        f"{r['micro_batch_tokens']} x {r['num_microbatches']} tokens, H={r['hidden_size']}"
        + (f", {r['cell_dtype']}" if r["cell_dtype"] != "bf16" else "")
        + (", overlap" if r["overlap"] else "")
    )


def write_png(records: Sequence[Record], path: Path) -> None:
    """Left: time per step of each dispatcher and cell, in parts. Right: losses over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ran = [r for r in records if not r["not_run"]]
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(15, max(5.0, 0.45 * len(ran))))
    names = [f"{label(r)}\n{r['system']} {r['dispatch_dtype']}" for r in ran]
    _draw_bars(bars, ran, names)
    for r, name in zip(ran, names, strict=True):
        line = "--" if r["system"] == STOCK else "-"
        curves.plot(range(1, len(r["losses"]) + 1), r["losses"], line, label=name.replace("\n", ": "))
    curves.set_xlabel("step")
    curves.set_ylabel("loss (nats per byte)")
    curves.grid(alpha=0.3)
    if ran:
        curves.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_bars(axes: Any, ran: Sequence[Record], names: Sequence[str]) -> None:
    places = range(len(ran))
    left = [0.0] * len(ran)
    parts = {
        "dispatch": [r["dispatch_ms"] for r in ran],
        "combine": [r["combine_ms"] for r in ran],
        # With overlap the parts run side by side, and may add up to more than the step.
        "the rest": [max(0.0, r["median_ms"] - r["dispatch_ms"] - r["combine_ms"]) for r in ran],
    }
    for part, widths in parts.items():
        axes.barh(places, widths, left=left, label=part)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    spread = [
        [max(0.0, r["median_ms"] - r["p10_ms"]) for r in ran],
        [max(0.0, r["p90_ms"] - r["median_ms"]) for r in ran],
    ]
    axes.errorbar([r["median_ms"] for r in ran], places, xerr=spread, fmt="k.", capsize=3, label="p10 to p90")
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(
        "ms per step, slowest rank; dispatch and combine: forward and backward, mean of the ranks"
    )
    axes.legend(fontsize=7)
