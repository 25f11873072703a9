"""`uccl_ep_train`: a high-throughput token dispatcher for mixture-of-experts training.

    from uccl_ep_train import Buffer, EpConfig

    with Buffer(group, EpConfig(num_experts=32, hidden=1024)) as buffer:
        got = buffer.dispatch(x, topk_idx, topk_weights)
        out = buffer.combine(experts(got.rows, got.tokens_per_expert) * got.row_weights[:, None], got.handle)

Names are loaded on first use: configuration, topology and errors work without torch and without the native
extension.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Bootstrap": "bootstrap",
    "Buffer": "engine",
    "Deadlines": "config",
    "DispatchHandle": "handle",
    "DispatchResult": "handle",
    "EpConfig": "config",
    "EpError": "errors",
    "Gpu": "config",
    "LocalBootstrap": "bootstrap",
    "LoopFaults": "config",
    "Memory": "config",
    "MemoryPlan": "stats",
    "Network": "config",
    "PendingCombine": "engine",
    "PendingDispatch": "engine",
    "Topology": "topology",
    "TorchBootstrap": "bootstrap",
    "Wire": "config",
    "memory_plan": "stats",
}

__all__ = [
    "Bootstrap",
    "Buffer",
    "Deadlines",
    "DispatchHandle",
    "DispatchResult",
    "EpConfig",
    "EpError",
    "Gpu",
    "LocalBootstrap",
    "LoopFaults",
    "Memory",
    "MemoryPlan",
    "Network",
    "PendingCombine",
    "PendingDispatch",
    "Topology",
    "TorchBootstrap",
    "Wire",
    "__version__",
    "memory_plan",
]

if TYPE_CHECKING:
    from uccl_ep_train.bootstrap import Bootstrap, LocalBootstrap, TorchBootstrap
    from uccl_ep_train.config import Deadlines, EpConfig, Gpu, LoopFaults, Memory, Network, Wire
    from uccl_ep_train.engine import Buffer, PendingCombine, PendingDispatch
    from uccl_ep_train.errors import EpError
    from uccl_ep_train.handle import DispatchHandle, DispatchResult
    from uccl_ep_train.stats import MemoryPlan, memory_plan
    from uccl_ep_train.topology import Topology


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
