"""How well predictions agree with what was measured and published, in numbers and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from uccl_ep_train.planner import fit, published


@dataclass(frozen=True)
class Summary:
    """Of relative errors, without sign. within_15, above_20: shares of the rows."""

    rows: int
    mean: float
    median: float
    most: float
    within_15: float
    above_20: float

    @classmethod
    def of(cls, errors: Sequence[float] | np.ndarray) -> Summary:
        sizes = np.abs(np.asarray(errors))
        return cls(
            len(sizes),
            float(sizes.mean()),
            float(np.median(sizes)),
            float(sizes.max()),
            float((sizes <= 0.15).mean()),
            float((sizes > 0.2).mean()),
        )

    def __str__(self) -> str:
        return (
            f"{self.rows:3d} rows: mean {self.mean:5.1%}, median {self.median:5.1%}, largest "
            f"{self.most:5.1%}, "
            f"within 15 %: {self.within_15:4.0%}, above 20 %: {self.above_20:4.0%}"
        )


def text(bench: Path) -> str:
    """Fits all, and lists every error. `bench`: the repository's folder. Raises InputError where it lacks
    files."""
    rows = fit.measured(bench / "results")
    fitted = [row for row in rows if fit.is_fitted(row)]
    others = [row for row in rows if not fit.is_fitted(row)]
    kernels, hosts = fit.fit(fitted)
    lines = ["rates fitted on our own rows:"]
    lines += [f"  {name:15s} {value:8.4g}" for name, value in kernels.as_dict().items()]
    lines += [f"  host_us of {file}: {us:.0f}" for file, us in hosts.items()]
    lines += [f"  {file}: rows of {commit}, {why}" for file, (commit, why) in fit.FILES.items()]
    for label, part in (("fitted", fitted), ("predicted", others)):
        errors = fit.errors(part, kernels, hosts)
        lines.append(f"{label:9s} {Summary.of(errors)}")
        several = [e for row, e in zip(part, errors, strict=True) if row.num_windows > 1]
        lines.append(f"  {'of several windows':32s} {Summary.of(several)}")
        for file in fit.FILES:
            own = [e for row, e in zip(part, errors, strict=True) if row.file == file]
            if own:
                lines.append(f"  {file:32s} {Summary.of(own)}")
        ordered = sorted(zip(errors, part, strict=True), key=lambda pair: -abs(pair[0]))
        lines += [
            f"  {error:+7.1%} of {row.us:6.0f} µs (runs spread by {row.spread:.0%}): {row}"
            for error, row in ordered
        ]
    lines.append("compared only, the same case in several jobs of one machine:")
    for kind, rows in fit.jobs(bench / "results").items():
        predicted = fit.predict(rows[0], kernels, hosts)
        lines.append(f"  {', '.join(f'{row.us:.0f}' for row in rows)} µs, predicted {predicted:.0f}: {kind}")
    figures = published.read(bench / "published.json")
    held = list(published.held_out(figures))
    lines.append(f"published, each number of ranks held out in turn: {Summary.of([e for _, e in held])}")
    lines += [f"  {error:+7.1%} of {figure.us:6.0f} µs: {figure}" for figure, error in held]
    lines += [f"  not predicted: {f}: {f.anomaly}" for f in figures if f.anomaly]
    lines.append("compared only, with rates of the others:")
    lines += [
        f"  {error:+7.1%} of {figure.us:6.0f} µs: {figure}" for figure, error in published.compared(figures)
    ]
    return "\n".join(lines)
