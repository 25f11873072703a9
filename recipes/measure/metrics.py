"""metrics.jsonl (one object a step) and the progress bar."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step of the whole job. Losses are nats per byte; times are those of rank 0."""

    step: int
    train_loss: float
    val_loss: float | None  # only of steps that end with a validation
    tokens_per_s: float  # bytes of text, all ranks
    dispatch_ms: float  # forward and backward
    combine_ms: float
    dispatcher: str


def read_metrics(path: Path) -> list[StepMetrics]:
    """All steps of a file; none if it does not exist. A line cut short by a crash ends the list."""
    steps: list[StepMetrics] = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                steps.append(StepMetrics(**json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                break
    return steps


class Reporter:
    """Writes metrics.jsonl and draws the progress bar; for rank 0 only."""

    def __init__(self, path: Path, num_steps: int, first_step: int, label: str) -> None:
        # A resumed run repeats the steps after its checkpoint, so their earlier lines are dropped.
        kept = [m for m in read_metrics(path) if m.step <= first_step]
        path.write_text("".join(json.dumps(asdict(m)) + "\n" for m in kept))
        self._file = path.open("a", buffering=1)
        self._val = next((m.val_loss for m in reversed(kept) if m.val_loss is not None), None)
        self._num_steps, self._first_step = num_steps, first_step
        self._started: float | None = None  # when the first of the steps began
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            desc=label,
            bar_format="{desc}: {bar:10} step {n_fmt} of {total_fmt}{postfix}",
            dynamic_ncols=True,
            mininterval=0.5,
        )

    def step(self, metrics: StepMetrics, step_ms: float) -> None:
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._val = metrics.val_loss if metrics.val_loss is not None else self._val
        if self._started is None:
            self._started = time.monotonic() - step_ms / 1e3
        # The mean over all steps so far, with validations and checkpoints.
        mean_s = (time.monotonic() - self._started) / (metrics.step - self._first_step)
        left_s = mean_s * (self._num_steps - metrics.step)
        share = (metrics.dispatch_ms + metrics.combine_ms) / step_ms
        self._bar.set_postfix_str(
            f"loss {metrics.train_loss:.3f}"
            + (f", val {self._val:.3f}" if self._val is not None else "")
            + f", {metrics.tokens_per_s / 1e3:.1f}k tokens/s, dispatch+combine {share:.0%}"
            + f", about {left_s:.0f} s left"
        )
        self._bar.update()

    def say(self, text: str) -> None:
        self._bar.write(text)

    def close(self) -> None:
        self._bar.close()
        self._file.close()
