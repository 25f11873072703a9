"""What this machine has of what some tests need."""

from __future__ import annotations

from functools import cache

from uccl_ep_train import EpConfig
from uccl_ep_train.core.native import probe_transports


@cache
def lacks_tcp() -> str:
    """Why rows cannot go over libfabric's tcp here; "" if they can. The libraries are found at run time."""
    ((_, usable, text, _),) = probe_transports(
        EpConfig(num_experts=8, hidden=256, ofi_provider="tcp"), ["ofi"]
    )
    return "" if usable else text
