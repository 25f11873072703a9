"""What this machine has of what some tests need."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from uccl_ep_train import EpConfig
from uccl_ep_train.core import cuda
from uccl_ep_train.core.native import probe_transports

needs_kernels = pytest.mark.skipif(not cuda.built(), reason="cuda.built() is False")


@cache
def lacks_tcp() -> str:
    """Why rows cannot go over libfabric's tcp here; "" if they can. The libraries are found at run time."""
    ((_, usable, text, _),) = probe_transports(
        EpConfig(num_experts=8, hidden=256, ofi_provider="tcp"), ["ofi"]
    )
    return "" if usable else text


def needs_gpus(number: int = 1) -> pytest.MarkDecorator:
    """Skips where there are fewer, or no kernels."""
    there = torch.cuda.device_count()
    why = f"GPUs needed: {number}, and kernels. device_count() is {there}, cuda.built() is {cuda.built()}"
    return pytest.mark.skipif(there < number or not cuda.built(), reason=why)
