"""CPU or GPUs: which of them a run uses, and what differs between the two. No other recipe code asks.

A rank needs a GPU of its own, unless NCCL lets ranks share them: from 2.30 on it does so where
NCCL_MULTI_RANK_GPU_ENABLE=1 is set. The ranks then take turns on the GPU: everything can be tried, but no
time can be measured.

`place` decides before the ranks start; every rank then calls `join`, before anything of CUDA is used. Small
data (losses, stop flags, counts) stays on the CPU and goes over gloo in both cases.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from recipes.models.recipe import Recipe
from uccl_ep_train.core import cuda
from uccl_ep_train.settings import env
from uccl_ep_train.settings.variables import of_launcher


class DeviceError(ValueError):
    """This machine does not have the GPUs that were asked for."""


def place(recipe: Recipe, *, keep_domains: bool = False) -> tuple[Recipe, str]:
    """The recipe for this machine, and why it uses the CPU: one line, empty if the CPU was asked for.

    On GPUs, and on several hosts without GPUs, the ranks of a host form one domain, whatever the recipe says.
    Smaller domains have to be asked for; rows then go to other domains through the proxies.

    keep_domains  the user asked for this domain_size

    Raises DeviceError if the recipe asks for "cuda" and that is impossible.
    """
    # Set by torchrun; without torchrun all ranks start here.
    on_this_host = of_launcher("LOCAL_WORLD_SIZE", 0, 0) or recipe.num_ranks
    why = "" if recipe.device == "cpu" else lacking(on_this_host)
    if why and recipe.device == "cuda":
        raise DeviceError(f"device = cuda: {why}")
    device = "cpu" if why or recipe.device == "cpu" else "cuda"
    if not keep_domains and (device == "cuda" or on_this_host < recipe.num_ranks):
        recipe = replace(recipe, domain_size=on_this_host)
    return replace(recipe, device=device), why and f"running on the CPU: {why}"


def lacking(num_ranks: int) -> str:
    """What `num_ranks` ranks on GPUs lack here; empty if nothing."""
    # Unlike is_available() this asks NVML and leaves CUDA alone, so that GPUs can still be hidden.
    there = torch.cuda.device_count()
    if there < (1 if cuda.ranks_may_share() else num_ranks):
        return f"{num_ranks} ranks need a GPU each, and torch sees {there}"
    return "" if cuda.built() else "the extension was built without CUDA kernels"


def join(device: str, local_rank: int) -> str:
    """Gives this process its GPU, or hides them all from it; returns the backend for torch.distributed."""
    if device == "cpu":
        env.set_value("CUDA_VISIBLE_DEVICES", "")
        return "gloo"
    env.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same products in every run
    torch.cuda.set_device(local_rank % torch.cuda.device_count() if cuda.ranks_may_share() else local_rank)
    return "cpu:gloo,cuda:nccl"


def own() -> torch.device:
    """Where the model and the batches of this process lie."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def synchronize() -> None:
    """Returns when all that this process has launched is done."""
    if own().type == "cuda":
        torch.cuda.synchronize()


def mark() -> Any:
    """A point in time: on a CPU the host's time, on a GPU the moment when its current stream gets there."""
    if own().type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """The time between two marks. A GPU must have passed both: see `synchronize`."""
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))
