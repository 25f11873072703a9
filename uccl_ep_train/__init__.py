"""`uccl_ep_train`: a high-throughput token dispatcher for mixture-of-experts training.

    from uccl_ep_train import Buffer, EpConfig

    with Buffer(group, EpConfig(num_experts=32, hidden=1024)) as buffer:
        got = buffer.dispatch(x, topk_idx, topk_weights)
        out = buffer.combine(experts(got.rows, got.tokens_per_expert) * got.row_weights[:, None], got.handle)

Names are loaded on first use: configuration, topology and errors work without torch and without the native
extension.

`api` has `Buffer`, `core` turns calls into native operations, `group` creates and ends a group. `settings`
has the configuration, `oracle` the reference in plain torch, `tools` programs, `megatron` the plug-in.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from uccl_ep_train.earlier_paths import HOMES, EarlierPaths

__version__ = "0.1.0"

_DEFINED_IN = {
    "Bootstrap": "group.bootstrap",
    "Buffer": "api.buffer",
    "Deadlines": "settings.config",
    "DispatchHandle": "common.handle",
    "DispatchResult": "common.handle",
    "EpConfig": "settings.config",
    "EpError": "errors",
    "Fp8Rows": "common.handle",
    "Gpu": "settings.config",
    "LocalBootstrap": "group.bootstrap",
    "LoopFaults": "settings.config",
    "LowLatency": "api.low_latency",
    "Memory": "settings.config",
    "MemoryPlan": "core.stats",
    "Network": "settings.config",
    "Operators": "api.operators",
    "PendingCombine": "api.buffer",
    "PendingDispatch": "api.buffer",
    "SlotHandle": "common.slots",
    "SlotRows": "common.slots",
    "SlotStatistics": "common.slots",
    "Topology": "core.topology",
    "TorchBootstrap": "group.bootstrap",
    "Wire": "settings.config",
    "combine_weights": "api.weights",
    "memory_plan": "core.stats",
}

__all__ = [
    "Bootstrap",
    "Buffer",
    "Deadlines",
    "DispatchHandle",
    "DispatchResult",
    "EpConfig",
    "EpError",
    "Fp8Rows",
    "Gpu",
    "LocalBootstrap",
    "LoopFaults",
    "LowLatency",
    "Memory",
    "MemoryPlan",
    "Network",
    "Operators",
    "PendingCombine",
    "PendingDispatch",
    "SlotHandle",
    "SlotRows",
    "SlotStatistics",
    "Topology",
    "TorchBootstrap",
    "Wire",
    "__version__",
    "combine_weights",
    "memory_plan",
]

if TYPE_CHECKING:
    from uccl_ep_train.api.buffer import Buffer, PendingCombine, PendingDispatch
    from uccl_ep_train.api.low_latency import LowLatency
    from uccl_ep_train.api.operators import Operators
    from uccl_ep_train.api.weights import combine_weights
    from uccl_ep_train.common.handle import DispatchHandle, DispatchResult, Fp8Rows
    from uccl_ep_train.common.slots import SlotHandle, SlotRows, SlotStatistics
    from uccl_ep_train.core.stats import MemoryPlan, memory_plan
    from uccl_ep_train.core.topology import Topology
    from uccl_ep_train.errors import EpError
    from uccl_ep_train.group.bootstrap import Bootstrap, LocalBootstrap, TorchBootstrap
    from uccl_ep_train.settings.config import Deadlines, EpConfig, Gpu, LoopFaults, Memory, Network, Wire


sys.meta_path.insert(0, EarlierPaths(__name__, HOMES))


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _DEFINED_IN.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
