"""python -m recipes.quality [--recipe paired_host] [--seeds 1 2 ...] [--variants alltoall ...]
                          [--branch-at STEP] [--so-far]

Trains the recipe with Megatron's all-to-all dispatcher and with ours in several ways, over several seeds, and
says whether

* BF16 and FP8 dispatch train as well: the 95 % interval of the paired difference from all-to-all
  (`measure/paired.py`) lies within +-0.3 % of the loss;
* each fault that was put in on purpose (see `dispatchers.ablate`) is found by that same test: the interval
  lies beyond the margin, so that noise cannot pass for the fault.

The loss of a run is the mean of its training losses over the last third of the steps. Runs of one seed see
the same batches, so that what a batch adds to the loss cancels in the difference. The validation loss at the
end is shown beside it; it decides nothing.

With --branch-at all runs of a seed go on from one checkpoint, which all-to-all has trained up to that step.
Where a loss falls fastest, runs of one dispatcher differ by when it does. All-to-all trained twice
(`alltoall_again`) shows which differences can be told at all; on CPUs it repeats its bits.

Finished runs in the folder are not repeated, so a stopped comparison goes on where it was. With --so-far
nothing is trained, and the table shows the runs that exist.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes import RECIPES
from recipes.launch import MOST_SEED, run_ranks
from recipes.measure.metrics import read_metrics
from recipes.measure.paired import difference
from recipes.models.recipe import Recipe
from recipes.training.checkpoint import Checkpoints
from uccl_ep_train.common.command_line import run, whole

MARGIN = 0.003
TAIL = 1 / 3
STOCK = "alltoall"
AGAIN = "alltoall_again"
VARIANTS = {
    STOCK: ["--token-dispatcher=alltoall"],
    AGAIN: ["--token-dispatcher=alltoall"],
    "bf16": ["--dispatch-dtype=bf16"],
    "fp8": ["--dispatch-dtype=fp8"],
    "fp8_grad": ["--dispatch-dtype=fp8", "--grad-dtype=fp8"],
    "wrong_scale": ["--dispatch-dtype=fp8", "--ablate=wrong_scale"],
    "zero_experts": ["--dispatch-dtype=bf16", "--ablate=zero_experts"],
    "zero_prob_grad": ["--dispatch-dtype=bf16", "--ablate=zero_prob_grad"],
}
EQUAL = ("bf16", "fp8")  # claimed; fp8_grad is in the table without a claim
FAULTS = ("wrong_scale", "zero_experts", "zero_prob_grad")


@dataclass(frozen=True)
class Losses:
    """The losses of a finished run, nats per byte. train: mean over the last third of the steps; val: after
    the last."""

    train: float
    val: float


Runs = dict[str, dict[int, Losses]]
"""By variant and seed; finished ones only."""


def final_losses(folder: Path, num_steps: int) -> Losses | None:
    """The losses, or None for a run that has not reached its last step."""
    steps = read_metrics(folder / "metrics.jsonl")
    if not steps or steps[-1].step != num_steps or steps[-1].val_loss is None:
        return None
    tail = [m.train_loss for m in steps if m.step > num_steps - max(1, round(TAIL * num_steps))]
    return Losses(statistics.mean(tail), steps[-1].val_loss)


def verdict(runs: Runs) -> tuple[str, bool]:
    """A table in Markdown, the claims below it, and whether all hold. A run is left out if its seed has no
    stock run. A variant with fewer than two seeds is not compared, and its claims do not hold."""
    lines = [
        f"| variant | seeds | loss | against {STOCK}, 95 % interval | validation loss | against {STOCK} |",
        "|---|---|---|---|---|---|",
    ]
    claims, holds = [], True
    for name in (name for name in VARIANTS if name in runs):
        seeds = sorted(runs[name].keys() & runs.get(STOCK, {}).keys())
        compared = len(seeds) >= 2
        train, stock_train = ([r[s].train for s in seeds] for r in (runs[name], runs.get(STOCK, {})))
        val, stock_val = ([r[s].val for s in seeds] for r in (runs[name], runs.get(STOCK, {})))
        cells = [name, ", ".join(map(str, seeds)) or "none"]
        for values, stock in ((train, stock_train), (val, stock_val)):
            cells.append(f"{statistics.mean(values):.4f}" if values else "")
            cells.append(str(difference(values, stock)) if compared and name != STOCK else "")
        lines.append(f"| {' | '.join(cells)} |")
        if name == STOCK:
            continue
        claim, good = _claim(name, train, stock_train) if compared else ("two seeds or more", False)
        claimed = name in (*EQUAL, *FAULTS)
        answers = ("DOES NOT HOLD", "holds") if claimed else ("no", "yes")
        claims.append(f"* {name}: {claim}: {answers[good]}")
        holds &= good or not claimed
    return "\n".join([*lines, "", *claims]), holds


def _claim(name: str, losses: Sequence[float], stock: Sequence[float]) -> tuple[str, bool]:
    found = difference(losses, stock)
    outcome = found.verdict(MARGIN)
    if name not in FAULTS:
        return f"{found}, within ±{MARGIN:.1%} ({outcome})", outcome == "equal"
    sigmas = (statistics.mean(losses) - statistics.mean(stock)) / statistics.stdev(stock)
    text = f"{found}, worse by more than {MARGIN:.1%} ({outcome}, {sigmas:.1f} sigma of the seeds)"
    return text, found.low > MARGIN


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="paired_host")
    # With three seeds, FP8's interval was as wide as the margin.
    parser.add_argument("--seeds", type=whole(0, MOST_SEED), nargs="+", default=list(range(1, 9)))
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=[v for v in VARIANTS if v != AGAIN]
    )
    parser.add_argument("--steps", type=whole(1), help="default: the recipe's")
    parser.add_argument(
        "--branch-at", type=whole(1), metavar="STEP", help=f"{STOCK} trains all runs' beginning"
    )
    parser.add_argument("--so-far", action="store_true", help="train nothing")
    args = parser.parse_args(argv)
    if len(set(args.seeds)) < 2:
        parser.error("a standard deviation needs at least two seeds")
    num_steps = args.steps or RECIPES[args.recipe]().num_steps
    if args.branch_at is not None and args.branch_at >= num_steps:
        parser.error(f"--branch-at {args.branch_at}: allowed is 1 .. {num_steps - 1}, before the last step")
    if STOCK not in args.variants:
        parser.error(f"everything is compared with {STOCK}")
    return args


def _train(recipe: Recipe, folder: Path, options: list[str]) -> int:
    print(folder, flush=True)
    return run_ranks(recipe.num_ranks, [f"--recipe={recipe.name}", f"--run-dir={folder}", *options])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    recipe = RECIPES[args.recipe]()
    num_steps = args.steps or recipe.num_steps
    runs: Runs = {name: {} for name in args.variants}
    for seed in args.seeds:
        settings = [f"--seed={seed}", f"--steps={num_steps}"]
        prefix, suffix = f"runs/quality/{args.recipe}-{num_steps}", f"-{seed}"
        if args.branch_at is not None:
            suffix += f"-from{args.branch_at}"
            trunk = Path(f"{prefix}-trunk{suffix}")
            begun = Checkpoints(trunk / "checkpoints", recipe).steps()[-1:] == [args.branch_at]
            if not begun and not args.so_far:
                status = _train(recipe, trunk, [*settings, *VARIANTS[STOCK], f"--stop-at={args.branch_at}"])
                if status != 0:
                    return status
            settings.append(f"--start-from={trunk}")
        for name in args.variants:
            folder = Path(f"{prefix}-{name}{suffix}")
            losses = final_losses(folder, num_steps)
            if losses is None and not args.so_far:
                status = _train(recipe, folder, [*settings, *VARIANTS[name]])
                if status != 0:
                    return status
                losses = final_losses(folder, num_steps)
                if losses is None:
                    return 130  # stopped in between; the same command goes on
            if losses is not None:
                runs[name][seed] = losses
    text, holds = verdict(runs)
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(run(main))
