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
    "DispatchHandle": "handle",
    "DispatchResult": "handle",
    "EpConfig": "config",
    "EpError": "errors",
    "LocalBootstrap": "bootstrap",
    "MemoryPlan": "stats",
    "PendingCombine": "engine",
    "PendingDispatch": "engine",
    "Topology": "topology",
    "TorchBootstrap": "bootstrap",
    "memory_plan": "stats",
}

__all__ = [
    "Bootstrap",
    "Buffer",
    "DispatchHandle",
    "DispatchResult",
    "EpConfig",
    "EpError",
    "LocalBootstrap",
    "MemoryPlan",
    "PendingCombine",
    "PendingDispatch",
    "Topology",
    "TorchBootstrap",
    "__version__",
    "memory_plan",
]

if TYPE_CHECKING:
    from uccl_ep_train.bootstrap import Bootstrap, LocalBootstrap, TorchBootstrap
    from uccl_ep_train.config import EpConfig
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
