"""Patches Megatron: three names here (a fourth if optimizers run in CUDA graphs), those of checkpoints in
`recompute.py`. `disable()` restores all.

The carrier `flex` / `hybridep` is not HybridEP: Megatron decides by these strings which tensors its schedules
may free and where they look for the dispatcher's state, and with them it does what our dispatcher needs.
With another string it would treat `uccl_ep` as all-to-all and free the experts' saved inputs.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from uccl_ep_train.common.opaque import opaque
from uccl_ep_train.common.shown import shown
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.group.lifecycle import check_live_buffers
from uccl_ep_train.megatron.alone import as_alltoall
from uccl_ep_train.megatron.buffers import BufferPool
from uccl_ep_train.megatron.compat import DispatcherMissingError, check_megatron
from uccl_ep_train.megatron.recompute import record_checkpoints
from uccl_ep_train.settings.checks import Value
from uccl_ep_train.settings.config import EpConfig, normalised
from uccl_ep_train.settings.fields import Section

if TYPE_CHECKING:
    from uccl_ep_train.api.buffer import Buffer

DISPATCHER_NAME = "uccl_ep"
CARRIER = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
REUSE_OPTION = "reuse_plans_in_recompute"
_DECIDED_BY_THE_MODEL = ("num_experts", "hidden", "source_order")


@dataclass
class _Enabled:
    """What `disable()` has to undo."""

    pool: BufferPool
    reuses_plans: bool
    undo: list[Callable[[], None]] = field(default_factory=list)
    dispatchers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    @property
    def options(self) -> dict[str, Value]:
        """As `enable` was given them."""
        return self.pool.options | {REUSE_OPTION: self.reuses_plans}


_enabled: _Enabled | None = None
_closing: BufferPool | None = None
"""That of the last `disable()`, which another thread may still be in."""


def enable(*, reuse_plans_in_recompute: bool = True, **options: Value | Section) -> dict[str, str]:
    """Makes every MoE layer that is built from now on use the `uccl_ep` dispatcher.

    reuse_plans_in_recompute: a layer recomputed by a checkpoint (Megatron's, TransformerEngine's or torch's)
    uses the plan of its first run and exchanges no routing; routing that differs raises PlanMismatchError.
    False: it makes a new plan. Equal on all ranks.
    options: arguments of `EpConfig`, sections too, except num_experts, hidden and source_order, which the
    model decides; what is not given comes from the environment (UCCL_EP_*) or the defaults.
    Returns the keyword arguments for TransformerConfig that carry the choice through Megatron; from now on
    moe_token_dispatcher_type="uccl_ep" in a TransformerConfig means the same.
    May be called again, also after a restart: what is left of a training whose process groups have been
    destroyed is closed when new layers are built, or here if the options are others.
    Raises ConfigError for a bad option or when already enabled with other ones, UnsupportedMegatronError,
    and ImportError without Megatron-Core. Building a layer with another dispatcher raises
    DispatcherMissingError.
    """
    global _enabled
    refused = [name for name in _DECIDED_BY_THE_MODEL if name in options]
    if refused:
        raise ConfigError(f"{refused[0]} is decided by the model; it cannot be an option")
    if not isinstance(reuse_plans_in_recompute, bool):
        raise ConfigError(f"{REUSE_OPTION} = {shown(reuse_plans_in_recompute)}; allowed is True | False")
    own = normalised(options)
    asked = own | {REUSE_OPTION: reuse_plans_in_recompute}
    if _enabled is not None and _enabled.options != asked:
        retire()
        if _enabled is not None:
            raise ConfigError(f"already enabled with {_enabled.options}; call disable() first")
    if _enabled is not None:
        return dict(CARRIER)
    EpConfig.from_env(
        num_experts=1, hidden=128, **own
    )  # a bad option is an error here, not at the first layer
    check_megatron()
    _enabled = _Enabled(BufferPool(own), reuse_plans_in_recompute)
    _accept_our_name(_enabled)
    _swap_dispatcher(_enabled)
    _check_each_layer(_enabled)
    if reuse_plans_in_recompute:
        _enabled.undo += record_checkpoints()
    # (That no step follows a failed operation is the buffers' own hook.)
    hook = register_optimizer_step_pre_hook(functools.partial(_before_optimizer_step, _enabled))
    _enabled.undo.append(hook.remove)
    _check_replayed_steps(_enabled)
    atexit.register(_disable_at_exit)
    return dict(CARRIER)


def disable(*, abort: bool = False) -> None:
    """Restores Megatron's names and closes all buffers; layers that used them raise ClosedError.

    abort: as of `Buffer.close`, also for buffers that another thread closes by `disable()`
    """
    global _enabled, _closing
    state, _enabled = _enabled, None
    if state is not None:
        atexit.unregister(_disable_at_exit)
        while state.undo:
            state.undo.pop()()
        _closing = state.pool
    if _closing is not None:
        _closing.close(abort=abort)


def _disable_at_exit() -> None:
    """Not after an exception: then the end of each buffer tells the other ranks which (`abandon`)."""
    if getattr(sys, "last_value", None) is None:
        disable()


def retire() -> None:
    """Disables the plug-in if it is left over from a training whose process groups have been destroyed.

    Without an abort: a rank may come here while others are in their last step.
    """
    if _enabled is not None and _enabled.pool.outlived:
        disable()


def verify(model: torch.nn.Module | Iterable[torch.nn.Module]) -> int:
    """Number of MoE layers of a model (or of a list of model chunks), each of which uses `uccl_ep`.

    Raises DispatcherMissingError naming the layer that has another one, and if there is no MoE layer at all:
    a pipeline stage without any should not be asked. Layers whose expert TP x EP group is this rank alone
    have Megatron's all-to-all dispatcher, which then does not communicate.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    layers = [(n, m) for chunk in chunks for n, m in chunk.named_modules() if isinstance(m, MoELayer)]
    if not layers:
        raise DispatcherMissingError("the model has no MoE layer")
    for name, layer in layers:
        _require_ours(layer, name)
    return len(layers)


def is_enabled() -> bool:
    return _enabled is not None


def describe() -> str:
    """The resolved configuration of every open buffer, each value with its source."""
    return "\n".join(config.describe() for config in _enabled.pool.configs()) if _enabled is not None else ""


def buffers() -> list[Buffer]:
    """The open buffers, one per expert parallel group and configuration; empty when disabled."""
    return list(_enabled.pool) if _enabled is not None else []


def _accept_our_name(state: _Enabled) -> None:
    """Lets a TransformerConfig name the dispatcher: "uccl_ep" becomes the carrier."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    stock_post_init = TransformerConfig.__post_init__

    @functools.wraps(stock_post_init)
    def post_init(self: Any) -> None:
        if self.moe_token_dispatcher_type == DISPATCHER_NAME:
            for name, value in CARRIER.items():
                setattr(self, name, value)
        stock_post_init(self)

    TransformerConfig.__post_init__ = post_init
    state.undo.append(lambda: setattr(TransformerConfig, "__post_init__", stock_post_init))


def _swap_dispatcher(state: _Enabled) -> None:
    from megatron.core import utils
    from megatron.core.transformer.moe import moe_layer

    from uccl_ep_train.megatron.dispatcher import UcclEpTokenDispatcher

    stock = moe_layer.MoEFlexTokenDispatcher

    def build(*args: Any, config: Any, pg_collection: Any = None, **kwargs: Any) -> Any:
        """What `MoELayer` calls instead of the class."""
        _require_carrier(config, "a MoE layer")
        if utils.get_pg_size(pg_collection.tp_ep) == 1:
            return moe_layer.MoEAlltoAllTokenDispatcher(
                *args, config=config, pg_collection=pg_collection, **kwargs
            )
        kwargs |= {"config": config, "pg_collection": pg_collection, "pool": state.pool}
        dispatcher = UcclEpTokenDispatcher(*args, **kwargs)
        state.dispatchers.add(dispatcher)
        return dispatcher

    moe_layer.MoEFlexTokenDispatcher = build
    state.undo.append(lambda: setattr(moe_layer, "MoEFlexTokenDispatcher", stock))


def _check_each_layer(state: _Enabled) -> None:
    """A layer with another dispatcher (a changed config, a framework's fallback) fails when it is built."""
    from megatron.core import utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    stock_init = MoELayer.__init__
    signature = inspect.signature(stock_init)

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        config = call.arguments["config"]
        if config.moe_token_dispatcher_type == DISPATCHER_NAME:
            raise DispatcherMissingError(
                f"moe_token_dispatcher_type = {DISPATCHER_NAME!r}: this TransformerConfig was made before "
                f"enable(). Make it afterwards, or with the arguments that it returns: {CARRIER}"
            )
        groups = call.arguments.get("pg_collection") or get_default_pg_collection()
        if config.moe_token_dispatcher_type == "flex" and utils.get_pg_size(groups.tp_ep) == 1:
            _require_carrier(config, "a MoE layer")
            state.pool.drop_outlived()
            call.arguments["config"] = as_alltoall(config)
        stock_init(*call.args, **call.kwargs)
        # Megatron numbers a layer after its construction.
        _require_ours(self, "a MoE layer" if self.layer_number is None else f"MoE layer {self.layer_number}")

    MoELayer.__init__ = init
    state.undo.append(lambda: setattr(MoELayer, "__init__", stock_init))


def _require_ours(layer: Any, name: str) -> None:
    from megatron.core import utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from uccl_ep_train.megatron.dispatcher import UcclEpTokenDispatcher

    found = layer.token_dispatcher
    if isinstance(found, UcclEpTokenDispatcher):
        _require_carrier(layer.config, name)
        return
    if type(found) is MoEAlltoAllTokenDispatcher and utils.get_pg_size(found.tp_ep_group) == 1:
        return
    raise DispatcherMissingError(
        f"{name} has {type(found).__name__} (moe_token_dispatcher_type = "
        f"{layer.config.moe_token_dispatcher_type!r}), not the uccl_ep dispatcher. Build the model after "
        f"enable(), with the arguments that it returns: {CARRIER}"
    )


def _require_carrier(config: Any, name: str) -> None:
    """Megatron's schedules would treat our dispatcher as that of another carrier, DeepEP's by default."""
    for field_name, wanted in CARRIER.items():
        value = getattr(config, field_name)
        if value != wanted:
            raise DispatcherMissingError(
                f"{name} has {field_name} = {shown(value)}; while the plug-in is enabled, allowed is "
                f"{wanted!r}. Make the TransformerConfig with the arguments that enable() returns: {CARRIER}"
            )


def _check_replayed_steps(state: _Enabled) -> None:
    """`--optimizer-cuda-graph`: no hook of torch's runs when the graph of a step is replayed."""
    try:
        from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper
    except ImportError:  # Megatron up to 0.19
        return
    stock_call = OptimizerCudaGraphWrapper.__call__

    @functools.wraps(stock_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_live_buffers()
        _before_optimizer_step(state)
        return stock_call(self, *args, **kwargs)

    OptimizerCudaGraphWrapper.__call__ = call
    state.undo.append(lambda: setattr(OptimizerCudaGraphWrapper, "__call__", stock_call))


@opaque
def _before_optimizer_step(state: _Enabled, *_args: Any) -> None:
    """Raises errors that a replayed CUDA graph could not raise."""
    for dispatcher in state.dispatchers:
        dispatcher.before_step()
