"""Checkpoints: a folder per step with one file per rank. A checkpoint counts once rank 0 has renamed it."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from recipes.models.architecture import Model
from recipes.models.recipe import Recipe

if TYPE_CHECKING:
    from recipes.training.build import Training

_KEPT = 2
_SETTINGS = "recipe.json"
# What a resumed run may change: neither its result nor its metrics depend on it.
_FREE = {"budget_bytes", "threads_per_rank", "val_interval", "checkpoint_interval"}
# What another run that goes on where this one ended may also change: weights and optimizer know nothing of
# it.
_FREE_TO_OTHERS = {"token_dispatcher", "dispatch_dtype", "grad_dtype", "domain_size", "ablate"}


class CheckpointError(RuntimeError):
    """A checkpoint is missing, or of a run with other settings, or cannot be read."""


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """All settings by name, the model's among them, as JSON has them."""
    settings = asdict(recipe)
    model = settings.pop("model")
    found: dict[str, Any] = json.loads(json.dumps(settings | model))
    return found


def _defaults() -> dict[str, Any]:
    """The values that apply to checkpoints written before a setting existed."""
    found: dict[str, Any] = {}
    for entry in (*fields(Recipe), *fields(Model)):
        if entry.default_factory is not MISSING:
            found[entry.name] = asdict(entry.default_factory())
        elif entry.default is not MISSING:
            found[entry.name] = entry.default
    return found


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run in `folder`. `save` and `restore` are collective.

    of_another  the folder is of a run that may have had another dispatcher
    """

    folder: Path
    recipe: Recipe
    of_another: bool = False

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        names = (re.fullmatch(r"step_(\d+)", p.name) for p in self.folder.glob("step_*"))
        return sorted(int(m.group(1)) for m in names if m)

    def check(self) -> None:
        """Raises CheckpointError, naming what differs, if the newest checkpoint is of another run."""
        if not self.steps():
            return
        # Checkpoints that name no device were made when there was only the CPU.
        about = self._path(self.steps()[-1]) / _SETTINGS
        try:
            written = dict(json.loads(about.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{about} has no settings of a run ({error})") from None
        saved = {"device": "cpu"} | _defaults() | written
        now = settings_of(self.recipe)
        free = _FREE | _FREE_TO_OTHERS if self.of_another else _FREE
        different = {
            key: {"saved": saved.get(key), "now": value}
            for key, value in now.items()
            if key not in free and saved.get(key) != value
        }
        if different:
            raise CheckpointError(
                f"{self.folder} is of a run with other settings: {different}. "
                "Give the old ones to resume it, --restart to overwrite it, or another --run-dir."
            )

    def check_files(self) -> None:
        """Raises CheckpointError naming a rank's file that the newest checkpoint lacks or has in part."""
        for step in self.steps()[-1:]:
            for path in (self._file(step, rank) for rank in range(self.recipe.num_ranks)):
                if not zipfile.is_zipfile(path):
                    why = "it is not whole" if path.exists() else "there is none"
                    raise CheckpointError(f"{path}: {why}; allowed is a file of each of the run's ranks")

    def save(self, training: Training, step: int) -> None:
        """The checkpoint is complete or absent, whenever the job is stopped: all write aside, then rank 0
        renames.

        No recipe draws random numbers on a GPU (weights are made on the CPU, and there is no dropout), so a
        GPU's generator is not saved.
        """
        final = self._path(step)
        aside = final.with_suffix(".part")
        aside.mkdir(parents=True, exist_ok=True)
        state = {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "scheduler": training.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, aside / self._file(step, dist.get_rank()).name)
        dist.barrier()
        if dist.get_rank() == 0:
            (aside / _SETTINGS).write_text(json.dumps(settings_of(self.recipe), indent=1))
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
            for old in self.steps()[:-_KEPT]:
                shutil.rmtree(self._path(old), ignore_errors=True)
        dist.barrier()

    def restore(self, training: Training) -> int:
        """Loads the newest checkpoint and returns its step; 0 without one. Raises CheckpointError."""
        newest = torch.tensor(self.steps()[-1] if self.steps() else 0)
        dist.broadcast(newest, src=0)  # one view of the folder for all ranks
        step = int(newest)
        if step == 0:
            return 0
        self.check()
        path = self._file(step, dist.get_rank())
        # On the CPU first, whatever GPU wrote it: each of the three copies to where its own tensors are.
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        return step

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _file(self, step: int, rank: int) -> Path:
        return self._path(step) / f"rank_{rank}.pt"
