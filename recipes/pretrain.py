"""Hands a full-size recipe over to Megatron-LM's own pretrain_gpt.py, on a rank that torchrun has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.arguments import command_line
from recipes.jobs import Job, check_package
from recipes.settings import RecipeError
from uccl_ep_train import env

_DATA = ("--mock-data", "--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path")


def command(job: Job, megatron_lm: Path | None, data_path: Sequence[str], extra: Sequence[str]) -> list[str]:
    """What this process becomes. `extra` comes last, so it overrides the recipe's.

    Raises RecipeError, saying what to give, where the script, the ranks, the data or the dispatcher's
    package are missing.
    """
    if megatron_lm is None:
        raise RecipeError(
            f"{job.name} is trained by Megatron-LM's pretrain_gpt.py: give its checkout, --megatron-lm PATH, "
            "or --dry-run to see what would run"
        )
    script = megatron_lm / "pretrain_gpt.py"
    if not script.is_file():
        raise RecipeError(f"--megatron-lm {megatron_lm}: no pretrain_gpt.py there")
    _check_ranks(job)
    if not data_path and not any(word.split("=")[0] in _DATA for word in extra):
        raise RecipeError("no data: give --data-path PREFIX, or `-- --mock-data` for a trial")
    check_package(job.dispatcher)
    data = ["--data-path", *data_path] if data_path else []
    launcher = [sys.executable, "-m", "uccl_ep_train.megatron.launch", str(script)]
    return [*launcher, *command_line(job.arguments), *data, *extra]


def start(words: list[str]) -> None:
    """Does not return."""
    sys.stdout.flush()
    os.execv(words[0], words)


def _check_ranks(job: Job) -> None:
    wanted = job.layout.num_ranks
    started = env.read("WORLD_SIZE", "")
    gpus = job.node.gpus if job.node else 1
    how = (
        f"torchrun --nnodes={-(-wanted // gpus)} --nproc-per-node={min(gpus, wanted)} ... -m recipes.launch "
        "..., or give another number with --num-ranks"
    )
    if not started:
        raise RecipeError(f"{job.name} needs {wanted} ranks here, and was not started by torchrun: {how}")
    if int(started) != wanted:
        raise RecipeError(f"{job.name} needs {wanted} ranks here, and torchrun started {started}: {how}")
