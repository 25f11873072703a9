"""Megatron-Core plug-in: the `uccl_ep` dispatcher in every MoE layer, without a fork.

    from uccl_ep_train.megatron import enable, verify

    carrier = enable(dispatch_dtype="fp8")            # before the model is built
    config = TransformerConfig(..., **carrier)
    model = GPTModel(config, ...)
    verify(model)                                     # raises unless every MoE layer uses uccl_ep

Existing pretraining scripts: `python -m uccl_ep_train.megatron.launch pretrain_gpt.py ...
--moe-token-dispatcher-type uccl_ep`. Start reading at `dispatcher.py`.

Names load on first use, so that `cpu_shims.install()` can run before Megatron is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "DispatcherMissingError": "compat",
    "UnsupportedMegatronError": "compat",
    "disable": "plugin",
    "enable": "plugin",
    "verify": "plugin",
}

__all__ = ["DispatcherMissingError", "UnsupportedMegatronError", "disable", "enable", "verify"]

if TYPE_CHECKING:
    from uccl_ep_train.megatron.compat import DispatcherMissingError, UnsupportedMegatronError
    from uccl_ep_train.megatron.plugin import disable, enable, verify


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
