"""Time of a Megatron training step with each dispatcher, in one job: the same weights, batches and groups.

Each cell of a sweep is a job of its own, unless torchrun started this one. In one job a second cell with
TransformerEngine ran out of memory that it has alone.

    python -m bench.megatron_step                                       starts the recipe's ranks on this host
    python -m bench.megatron_step --micro-batch-tokens 1024 4096 --hidden 2048 7168 --overlap off on
    torchrun --nproc_per_node=8 -m bench.megatron_step --num-ranks 8

Dispatchers take turns step by step, so that ratios are of neighbouring steps. BF16 losses that must be
equal bit for bit are compared; a difference ends the benchmark with an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

from bench import report
from bench.step_cases import Cell, base_recipe, cells_of, parse_args
from recipes.launch import STOPPED, run_ranks, set_up_rank
from recipes.models.recipe import Recipe, RecipeError
from recipes.plan import devices
from recipes.plan.devices import DeviceError

PROGRAM = ("-m", "bench.megatron_step")


def numbers_of(args: argparse.Namespace, cells: list[Cell]) -> list[int]:
    """Of the cells that run, from 1."""
    return [args.cell] if args.cell else list(range(1, len(cells) + 1))


def run_cell(cell: Cell, title: str, args: argparse.Namespace, about: report.Record) -> list[report.Record]:
    """Collective. Prints the cell's table on rank 0."""
    from bench import step_measure, step_report  # they import Megatron, so the rank is set up first

    first = dist.get_rank() == 0
    started = time.monotonic()
    trained: list[step_measure.Trained] = []
    refused = dict.fromkeys(args.dispatchers, cell.problem)
    if not cell.problem:
        progress = report.Progress(title, active=first)
        trained, refused = step_measure.measure(
            cell, args.dispatchers, args.warmup, Path("runs") / "data", progress
        )
    records = step_report.records_of(cell, trained, refused, about)
    if first:
        seconds = time.monotonic() - started
        print(
            f"\n{title}; {args.steps} steps each, {seconds:.0f} s\n{step_report.table(records)}", flush=True
        )
    return records


def run_rank(args: argparse.Namespace, recipe: Recipe) -> int:
    """Runs one rank."""
    set_up_rank(recipe)
    from bench import step_report
    from bench.step_split import link_gbytes_per_s

    first = dist.get_rank() == 0
    about = report.about_here(args.commit) | step_report.about_versions()
    about["link_gbytes_per_s"] = link_gbytes_per_s() if recipe.device == "cuda" else None
    cells = cells_of(args, recipe)
    results = Path(f"{args.out}.json")
    earlier = json.loads(results.read_text()) if args.cell and first and results.exists() else []
    records: list[report.Record] = []
    for number in numbers_of(args, cells):
        cell = cells[number - 1]
        records += run_cell(cell, f"[{number}/{len(cells)}] {cell}", args, about)
        if first:
            report.write_json(earlier + records, results)
    broken = [
        f"{step_report.label(r)}: {problem}" for r in records if (problem := step_report.broken_promise(r))
    ]
    if first:
        step_report.write_png(earlier + records, Path(f"{args.out}.png"))
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        print(f"\n{about['hardware']}, {versions}, commit {about['commit']}")
        print(f"written: {args.out}.json and .png", flush=True)
        print("\n".join(broken), end="\n" if broken else "", file=sys.stderr, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if broken else 0


def main(argv: list[str]) -> int:
    args = parse_args(argv, str(__doc__).splitlines()[0])
    try:
        recipe, why_cpu = devices.place(base_recipe(args))
    except (RecipeError, DeviceError) as error:
        print(error, file=sys.stderr)
        return 2
    if dist.is_torchelastic_launched():
        return run_rank(args, recipe)
    cells = cells_of(args, recipe)
    numbers = numbers_of(args, cells)
    problems = [cells[number - 1].problem for number in numbers]
    if all(problems):
        print("nothing to measure: " + "; ".join(dict.fromkeys(problems)), file=sys.stderr)
        return 2
    if why_cpu:
        print(why_cpu, flush=True)
    # The device is decided once, here: if an option is given twice, the last one counts.
    argv = [*argv, f"--device={recipe.device}"]
    if not args.cell:
        Path(f"{args.out}.json").unlink(missing_ok=True)
    status = 0
    for number in numbers:  # a cell that fails does not take the others with it
        failed = run_ranks(recipe.num_ranks, [*argv, f"--cell={number}"], program=PROGRAM)
        status = failed or status
        if failed == STOPPED:
            break
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
