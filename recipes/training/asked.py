"""What a command line asks of a recipe that `training/loop.py` trains: refused here, before ranks start.

A dry run asks the same, so it refuses what the run would refuse, except GPUs and packages of this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from recipes.measure.router_trace import saved_steps
from recipes.models.recipe import Recipe, RecipeError
from recipes.training.checkpoint import CheckpointError, Checkpoints

_OF_UCCL_EP = ("dispatch_dtype", "grad_dtype", "domain_size")


def check_dispatcher_options(args: argparse.Namespace, dispatchers: Iterable[str]) -> None:
    """dispatchers: all that this command line trains with. Domains matter to any dry run.

    Raises RecipeError for an option that none of them would follow.
    """
    chosen = list(dict.fromkeys(dispatchers))
    if "uccl_ep" in chosen:
        return
    for name in _OF_UCCL_EP:
        if getattr(args, name) is not None and not (name == "domain_size" and args.dry_run):
            raise RecipeError(
                f"--{name.replace('_', '-')} {getattr(args, name)} with token_dispatcher = "
                f"{' and '.join(chosen)}: it is for uccl_ep; allowed are --token-dispatcher uccl_ep, "
                "or none of the option"
            )


def check_run(args: argparse.Namespace, recipe: Recipe, why_cpu: str = "") -> None:
    """Where the run stops, and what its dispatchers need; why_cpu: of `devices.place`. Raises RecipeError."""
    dispatchers = [recipe.token_dispatcher, args.compare or recipe.token_dispatcher]
    check_dispatcher_options(args, dispatchers)
    for dispatcher in dispatchers:
        if dispatcher.startswith("flex") and recipe.device == "cpu":
            raise RecipeError(f"token_dispatcher = {dispatcher}: it needs GPUs; {why_cpu or 'device = cpu'}")
    if args.stop_at is not None and not 1 <= args.stop_at <= recipe.num_steps:
        raise RecipeError(f"stop_at = {args.stop_at}: allowed is 1 .. {recipe.num_steps}, the run's steps")
    if args.stop_at is not None and recipe.distributed_optimizer:
        raise RecipeError(f"stop_at = {args.stop_at}: a run with distributed_optimizer writes no checkpoints")


def check_folders(args: argparse.Namespace, recipe: Recipe, runs: dict[Path, str]) -> None:
    """What lies in the folders of the runs, each with its dispatcher. Makes none. Raises CheckpointError."""
    for folder, dispatcher in runs.items():
        own = replace(recipe, token_dispatcher=dispatcher)
        checkpoints = Checkpoints(folder / "checkpoints", own)
        # One to compare with may not have begun.
        if args.resume and folder == next(iter(runs)) and not checkpoints.steps():
            raise CheckpointError(f"--resume: no checkpoint in {folder}")
        if not args.restart:
            checkpoints.check()
            checkpoints.check_files()
        if args.start_from is not None:
            other = Checkpoints(args.start_from / "checkpoints", own, of_another=True)
            _check_start(other, folder)
        if args.router_trace is not None:
            begun = [] if args.restart else checkpoints.steps()
            if not begun and args.start_from is not None:
                begun = other.steps()
            _check_router_trace(args, recipe, (begun or [0])[-1])
        _check_writable(folder)


def _check_router_trace(args: argparse.Namespace, recipe: Recipe, begin: int) -> None:
    """begin: the step that the run goes on from."""
    end = args.stop_at or recipe.num_steps
    steps = saved_steps(recipe.num_steps)
    if not any(begin < step <= end for step in steps):
        raise CheckpointError(
            f"--router-trace {args.router_trace}: allowed is a run that does one of the steps "
            f"{', '.join(map(str, steps))}, of which routing is saved; this one would go "
            f"from step {begin} to {end}"
        )


def make_folders(runs: Iterable[Path]) -> None:
    """Raises CheckpointError."""
    for folder in runs:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"--run-dir {folder}: it cannot be made ({error.strerror})") from None


def _check_start(other: Checkpoints, run_dir: Path) -> None:
    if other.folder.resolve() == (run_dir / "checkpoints").resolve():
        raise CheckpointError(f"--start-from {run_dir}: allowed is another run's folder than --run-dir")
    if not other.steps():
        raise CheckpointError(f"--start-from: no checkpoint in {other.folder}")
    other.check()
    other.check_files()


def _check_writable(folder: Path) -> None:
    """Of the nearest folder above that exists, if this one does not."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        why = "File exists" if there == folder else "Not a directory"
        raise CheckpointError(f"--run-dir {folder}: it cannot be made ({why})")
    if not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(f"--run-dir {folder}: {there} cannot be written")
