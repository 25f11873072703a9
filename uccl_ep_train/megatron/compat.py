"""What the plug-in needs from Megatron-Core, checked before anything is patched."""

from __future__ import annotations

import inspect

from uccl_ep_train.errors import EpError


class UnsupportedMegatronError(EpError):
    """This Megatron-Core does not have the interface that the plug-in was written for."""


class DispatcherMissingError(EpError):
    """A MoE layer does not use the `uccl_ep` dispatcher."""


_CONSTRUCTOR = ["self", "num_local_experts", "local_expert_indices", "config", "pg_collection"]
_STAGES = {
    "dispatch_preprocess", "token_dispatch", "dispatch_postprocess",
    "combine_preprocess", "token_combine", "combine_postprocess", "_initialize_metadata",
}  # fmt: skip


def check_megatron() -> None:
    """Raises UnsupportedMegatronError, naming what is different, or ImportError without Megatron-Core."""
    from megatron.core import package_info
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import moe_layer, token_dispatcher

    version = getattr(package_info, "__version__", "of unknown version")

    def refuse(what: str) -> None:
        raise UnsupportedMegatronError(
            f"Megatron-Core {version}: {what}. Tested with 0.16.1 and 0.19.2; nothing was changed."
        )

    for name in ("MoELayer", "MoEFlexTokenDispatcher", "MoEAlltoAllTokenDispatcher"):
        if not hasattr(moe_layer, name):
            refuse(f"megatron.core.transformer.moe.moe_layer has no {name}")
    flex = token_dispatcher.MoEFlexTokenDispatcher
    parameters = list(inspect.signature(flex.__init__).parameters)
    if parameters != _CONSTRUCTOR:
        refuse(f"MoEFlexTokenDispatcher takes {parameters}, not {_CONSTRUCTOR}")
    missing = sorted(name for name in _STAGES if not hasattr(flex, name))
    if missing:
        refuse(f"MoEFlexTokenDispatcher has no {', '.join(missing)}")
    for name in ("CheckpointFunction", "CheckpointWithoutOutput"):
        if not hasattr(mcore_random, name):
            refuse(f"megatron.core.tensor_parallel.random has no {name}")
