"""Steps of full-size recipes, a few layers each, as Megatron-LM's own pretrain_gpt.py runs and times them.

    python -m bench.recipe_trials --megatron-lm PATH [--trials deepseek_v2_lite:4 ...] [-- ...]

Each trial is a `python -m recipes.launch --recipe NAME --trial LAYERS` on this host's GPUs. Megatron-LM
prints each step's time; the first steps, in which kernels are compiled, are left out. Each dispatcher has its
own job; in `bench/megatron_step.py` they take turns step by step. Arguments after -- are for pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench import report
from bench.bounds import RANKS, add_output
from bench.report import Record
from recipes import PRETRAININGS
from recipes.plan.arguments import DISPATCHERS
from uccl_ep_train.common.command_line import whole

TRIALS = ("deepseek_v2_lite:4", "qwen3_30b_a3b:4", "mixtral_8x7b:3")
NUM_WARMUP = 4  # steps
STEP = re.compile(r"elapsed time per iteration \(ms\): (\S+) .*lm loss: (\S+) ")
MEMORY = re.compile(r"max allocated: (\S+) ")  # MB of 2^20 bytes


class TrialError(RuntimeError):
    """Megatron-LM ended with an error, or printed no steps."""


def steps_of(printed: str) -> Record:
    """Fields of a record from what a run printed. Raises TrialError if no steps follow the warm-up."""
    steps = STEP.findall(printed)
    if len(steps) <= NUM_WARMUP:
        raise TrialError(f"{len(steps)} steps were printed; more than {NUM_WARMUP} are needed")
    step_ms = torch.tensor([float(ms) for ms, _ in steps[NUM_WARMUP:]], dtype=torch.float64)
    memory = MEMORY.findall(printed)
    return {
        "runs": len(step_ms),
        **{
            f"{name}_us": report.quantile(1e3 * step_ms, q)
            for name, q in (("median", 0.5), ("p10", 0.1), ("p90", 0.9))
        },
        "losses": [float(loss) for _, loss in steps],
        "peak_memory_bytes": round(max(map(float, memory)) * 2**20) if memory else None,
    }


def run(recipe: str, layers: int, dispatcher: str, args: argparse.Namespace) -> Record:
    """Raises TrialError."""
    command = [
        sys.executable, "-m", "recipes.launch", f"--recipe={recipe}", f"--trial={layers}",
        f"--steps={args.steps}", f"--token-dispatcher={dispatcher}", f"--megatron-lm={args.megatron_lm}",
    ]  # fmt: skip
    if args.num_ranks is not None:
        command.append(f"--num-ranks={args.num_ranks}")
    done = subprocess.run(
        [*command, "--", *args.extra],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        raise TrialError("\n".join(done.stdout.splitlines()[-40:]))
    return steps_of(done.stdout)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.recipe_trials", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--megatron-lm", type=Path, required=True, help="a checkout, with pretrain_gpt.py")
    parser.add_argument("--trials", nargs="+", default=TRIALS, metavar="RECIPE:LAYERS")
    parser.add_argument("--dispatchers", nargs="+", choices=DISPATCHERS, default=["uccl_ep", "alltoall"])
    parser.add_argument("--num-ranks", type=RANKS, help="default: as many as there are GPUs")
    parser.add_argument("--steps", type=whole(NUM_WARMUP + 1), default=20)
    add_output(parser, "recipe_trials")
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.extra = argv[end + 1 :]
    for trial in args.trials:
        name, _, layers = trial.partition(":")
        if name not in PRETRAININGS or not layers.isdecimal() or int(layers) < 1:
            parser.error(f"--trials {trial}: allowed is RECIPE:LAYERS, of {', '.join(PRETRAININGS)}")
    if not (args.megatron_lm / "pretrain_gpt.py").is_file():
        parser.error(f"--megatron-lm {args.megatron_lm}: allowed is a checkout, with pretrain_gpt.py")
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    package = args.megatron_lm / "megatron" / "core" / "package_info.py"
    version = runpy.run_path(str(package))["__version__"] if package.is_file() else "unknown"
    records: list[Record] = []
    failed = False
    for trial in args.trials:
        recipe, _, layers = trial.partition(":")
        for dispatcher in args.dispatchers:
            started = time.monotonic()
            record: Record = {"system": dispatcher, "op": "step", "recipe": recipe, "layers": int(layers)}
            try:
                record |= run(recipe, int(layers), dispatcher, args) | {"not_run": ""}
            except TrialError as error:
                failed = True
                record |= {"median_us": None, "not_run": str(error)}
            record |= {
                "ranks": args.num_ranks or torch.cuda.device_count(),
                "extra": args.extra,
                "megatron_lm": version,
            }
            records.append(record | report.about_here(args.commit))
            report.write_json(records, Path(f"{args.out}.json"))
            print(f"{line(record)}; {time.monotonic() - started:.0f} s", flush=True)
    print(f"written: {args.out}.json")
    return int(failed)


def line(record: Record) -> str:
    """A record as a line for the terminal."""
    title = f"{record['recipe']}, {record['layers']} layers, {record['system']}"
    if record["not_run"]:
        return f"{title}: not run: {record['not_run']}"
    ms = [f"{record[f'{name}_us'] / 1e3:.1f}" for name in ("median", "p10", "p90")]
    memory = record["peak_memory_bytes"]
    gib = "?" if memory is None else f"{memory / 2**30:.1f}"
    return (
        f"{title}: {ms[0]} ms a step (p10 {ms[1]}, p90 {ms[2]}), {gib} GiB, loss {record['losses'][-1]:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
