"""Ranks of tests of the module of DeepEP's shape: on CPUs, or with `--backend cuda` on a GPU each.

With NVIDIA's MPS ranks may share GPUs; CUDA_MPS_PIPE_DIRECTORY says that it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import ON_GPUS
from tests.process_ranks import ProcessRanks, Rank


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
