"""Ranks of tests of the module of DeepEP's shape: on CPUs, or with `--backend cuda` on a GPU each.

With NVIDIA's MPS ranks may share GPUs; CUDA_MPS_PIPE_DIRECTORY says that it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import pytest
import torch
from torch import Tensor

from tests.harness import ON_GPUS
from tests.process_ranks import ProcessRanks, Rank

P = ParamSpec("P")
Drawn = TypeVar("Drawn", bound=Tensor | tuple[Tensor, ...])


def drawn_on_cpu(draw: Callable[P, Drawn]) -> Callable[P, Drawn]:
    """The same numbers on any device: draws on the CPU, for torch's default device."""

    @wraps(draw)
    def on_device(*args: P.args, **kwargs: P.kwargs) -> Drawn:
        there = torch.get_default_device()
        with torch.device("cpu"):
            drawn = draw(*args, **kwargs)
        moved: Any
        if isinstance(drawn, Tensor):
            moved = drawn.to(there)
        else:
            moved = tuple(tensor.to(there) for tensor in drawn)
            if hasattr(drawn, "_make"):  # a NamedTuple
                moved = drawn._make(moved)
        return moved

    return on_device


def on_gpu(rank: Rank, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    device = rank.rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    torch.set_default_device(f"cuda:{device}")
    return target(rank, *args)


def module_ranks(num_ranks: int, target: Callable[..., Any], args: tuple[Any, ...] = ()) -> ProcessRanks:
    """Skips the test if there are too few GPUs."""
    if not ON_GPUS:
        return ProcessRanks(num_ranks, target, args)
    there = torch.cuda.device_count()
    if there < num_ranks and not (there and "CUDA_MPS_PIPE_DIRECTORY" in os.environ):
        pytest.skip(f"GPUs needed: {num_ranks}, or MPS; device_count() is {there}")
    return ProcessRanks(num_ranks, on_gpu, (target, args))
