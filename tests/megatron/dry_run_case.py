"""Dry runs in a process of their own, which imports Megatron once for all of them."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

from recipes import PRETRAININGS, RECIPES
from recipes.plan import dry_run, jobs, parameters


@dataclass(frozen=True)
class Outcome:
    """Of one dry run. `refused` is the class and text of what was raised, empty if nothing was."""

    refused: str = ""
    text: str = ""
    total: int = 0
    active: int = 0
    active_without_input: int = 0
    mtp: int = 0
    needed_bytes: int = 0
    gpu_bytes: int = 0


def prepare() -> None:
    warnings.filterwarnings("ignore")
    parameters.prepare()


def look(
    name: str,
    hardware: str = "",
    changes: dict[str, Any] | None = None,
    only_config: bool = False,
    **options: Any,
) -> Outcome:
    """changes: of the layout, or with a leading "model." of the model. only_config: builds no module."""
    if name in RECIPES:
        job = jobs.of_recipe(dataclasses.replace(RECIPES[name](), **options))
    else:
        job = jobs.of_pretraining(PRETRAININGS[name](), hardware, **options)
    job = _changed(job, changes or {})
    try:
        if only_config:
            parameters.check(job.arguments)
            return Outcome()
        found = dry_run.inspect(job)
        found.check()
    except Exception as error:
        return Outcome(refused=f"{type(error).__name__}: {error}")
    p = found.parameters
    return Outcome(
        text=dry_run.report(found),
        total=p.total,
        active=p.active,
        active_without_input=p.active - p.input_embedding,
        mtp=p.mtp,
        needed_bytes=found.memory.total_bytes,
        gpu_bytes=found.gpu_bytes,
    )


def _changed(job: jobs.Job, changes: dict[str, Any]) -> jobs.Job:
    from recipes.plan.arguments import layout_arguments, model_arguments

    of_model = {k.removeprefix("model."): v for k, v in changes.items() if k.startswith("model.")}
    of_layout = {k: v for k, v in changes.items() if not k.startswith("model.")}
    job = dataclasses.replace(
        job,
        model=dataclasses.replace(job.model, **of_model),
        layout=dataclasses.replace(job.layout, **of_layout),
    )
    return job.with_arguments(model_arguments(job.model) | layout_arguments(job.layout))
