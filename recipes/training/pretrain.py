"""Hands a full-size recipe over to Megatron-LM's own pretrain_gpt.py, on a rank that torchrun has started."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.models.recipe import RecipeError
from recipes.plan.arguments import Arguments, command_line
from recipes.plan.jobs import Job, check_package
from uccl_ep_train.settings import env
from uccl_ep_train.settings.variables import of_launcher

_DATA = ("--mock-data", "--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path")


def command(job: Job, megatron_lm: Path | None, data_path: Sequence[str], extra: Sequence[str]) -> list[str]:
    """The command that replaces this process. `extra` comes last, so it overrides the recipe's arguments.

    Raises RecipeError, saying what to give, where the script, the ranks, the data or the dispatcher's
    package are missing.
    """
    script = script_of(job, megatron_lm)
    _check_ranks(job)
    given = [*extra, *command_line(job.arguments)]
    if not data_path and not any(word.split("=")[0] in _DATA for word in given):
        raise RecipeError("no data: give --data-path PREFIX, or `-- --mock-data` to try it")
    check_package(job.dispatcher)
    data = ["--data-path", *data_path] if data_path else []
    launcher = [sys.executable, "-m", "uccl_ep_train.megatron.launch", str(script)]
    return [*launcher, *command_line(job.arguments | _without_apex()), *data, *extra]


def script_of(job: Job, megatron_lm: Path | None) -> Path:
    """The path of pretrain_gpt.py. Raises RecipeError if there is none."""
    if megatron_lm is None:
        raise RecipeError(
            f"{job.name} is trained by Megatron-LM's pretrain_gpt.py: give its checkout, --megatron-lm PATH, "
            "or --dry-run to see what would run"
        )
    script = megatron_lm / "pretrain_gpt.py"
    if not script.is_file():
        raise RecipeError(f"--megatron-lm {megatron_lm}: no pretrain_gpt.py there")
    return script


def start(words: list[str]) -> None:
    """Replaces this process by the command; does not return."""
    sys.stdout.flush()
    os.execv(words[0], words)


def _without_apex() -> Arguments:
    """Megatron-LM adds up gradients of the output layer in a kernel of APEX, and stops if the kernel is
    missing."""
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None:
        return {}
    return {"no_gradient_accumulation_fusion": True}


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
    if of_launcher("WORLD_SIZE", 0, 1) != wanted:
        raise RecipeError(f"{job.name} needs {wanted} ranks here, and torchrun started {started}: {how}")
