"""python -m recipes.quality [--seeds 1 2 3] [--steps 240]

Trains the recipe over several seeds with FP8 dispatch, with BF16 dispatch, and with each ablation, and says
whether FP8 ends within 1 % of BF16 and each ablation worse by at least 3 standard deviations of the seeds.
Finished runs in the folder are not repeated, so a stopped comparison goes on where it was.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from recipes import RECIPES
from recipes.launch import run_ranks
from recipes.metrics import read_metrics
from recipes.settings import ABLATIONS

FP8_MARGIN = 0.01
CONTROL_SIGMAS = 3.0
_OPTIONS = {
    "fp8": ["--dispatch-dtype=fp8"],
    "bf16": ["--dispatch-dtype=bf16"],
} | {name: ["--dispatch-dtype=bf16", f"--ablate={name}"] for name in ABLATIONS if name != "none"}


def final_loss(folder: Path, num_steps: int) -> float | None:
    """Validation loss after the last step; None for a run that has not got there."""
    last = next((m for m in reversed(read_metrics(folder / "metrics.jsonl"))), None)
    return last.val_loss if last is not None and last.step == num_steps else None


def verdict(losses: dict[str, list[float]]) -> tuple[str, bool]:
    """The table and whether every claim holds. `losses`: by variant, one per seed, the same seeds in all."""
    sigma = statistics.stdev(losses["bf16"])
    base = statistics.mean(losses["bf16"])
    lines, holds = [f"final validation loss, nats per byte; sigma of the seeds (bf16) {sigma:.4f}"], True
    for name, values in losses.items():
        mean = statistics.mean(values)
        text = f"  {name:15s} mean {mean:.4f}  ({', '.join(f'{v:.4f}' for v in values)})"
        if name == "fp8":
            good = abs(mean / base - 1) <= FP8_MARGIN
            text += f"  {mean / base - 1:+.2%} of bf16: {'holds' if good else 'DOES NOT HOLD'}"
            holds &= good
        elif name != "bf16":
            good = mean - base >= CONTROL_SIGMAS * sigma
            text += f"  worse by {(mean - base) / sigma:.1f} sigma: {'holds' if good else 'DOES NOT HOLD'}"
            holds &= good
        lines.append(text)
    return "\n".join(lines), holds


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.quality", description=__doc__)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="tiny_host")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    args = parser.parse_args(argv)
    if len(args.seeds) < 2:
        parser.error("a standard deviation needs at least two seeds")
    recipe = RECIPES[args.recipe]()
    num_steps = args.steps or recipe.num_steps
    losses: dict[str, list[float]] = {name: [] for name in _OPTIONS}
    for seed in args.seeds:
        for name, options in _OPTIONS.items():
            folder = Path("runs") / "quality" / f"{args.recipe}-{num_steps}-{name}-{seed}"
            if final_loss(folder, num_steps) is None:
                print(f"{name}, seed {seed}: {folder}", flush=True)
                own = [f"--recipe={args.recipe}", f"--seed={seed}", f"--steps={num_steps}", *options]
                status = run_ranks(recipe.num_ranks, [*own, f"--run-dir={folder}"])
                if status != 0:
                    return status
            loss = final_loss(folder, num_steps)
            if loss is None:
                return 130  # stopped in between; the same command goes on
            losses[name].append(loss)
    text, holds = verdict(losses)
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
