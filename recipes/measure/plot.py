"""The loss curves of one or several runs as a PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from recipes.measure.metrics import read_metrics


def plot_losses(metrics_files: list[Path], png: Path) -> None:
    """Train loss (smoothed over ten steps) as a line, validation loss as dots, nats per byte over steps."""
    figure, axes = plt.subplots(figsize=(8, 5))
    for path in metrics_files:
        steps = read_metrics(path)
        if not steps:
            continue
        losses = [m.train_loss for m in steps]
        smooth = [sum(w) / len(w) for i in range(len(losses)) if (w := losses[max(0, i - 9) : i + 1])]
        (line,) = axes.plot([m.step for m in steps], smooth, label=f"{steps[0].dispatcher}, train")
        validated = [(m.step, m.val_loss) for m in steps if m.val_loss is not None]
        axes.plot(*zip(*validated, strict=True), "o", color=line.get_color(),
                  label=f"{steps[0].dispatcher}, validation")  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    temporary = png.with_suffix(".part.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.replace(png)
