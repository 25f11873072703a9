"""Runs on the ranks: enabling, verifying, disabling; recomputation. Errors come back by name, as results."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
import sys
import time
import types
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_layer, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from recipes.plan import devices
from tests.megatron.settings import TrainCase
from tests.megatron.training_case import (
    batches_of,
    build,
    initialize,
    moe_layers,
    train_step,
    transformer_config,
)
from uccl_ep_train.errors import EpError
from uccl_ep_train.megatron import dispatcher, plugin

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _error(action: Callable[[], Any]) -> tuple[str, str]:
    """(class name, message) of what `action` raises; two empty strings if nothing."""
    try:
        action()
    except (EpError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def _fresh(case: TrainCase) -> None:
    plugin.disable()
    initialize(case.tp, case.ep, case.etp)


def lifecycle(rank: int) -> dict[str, Any]:
    """What enable, verify and disable leave behind."""
    case = TrainCase(layers=3)
    _fresh(case)
    stock = _patched_names()
    model, _, _ = build(case)
    replaced = sum(map(operator.ne, stock, _patched_names()))
    layers = moe_layers(model)
    named = {"moe_token_dispatcher_type": "uccl_ep"}
    by_name = transformer_config(case, named)
    result = {
        "our name": (by_name.moe_token_dispatcher_type, by_name.moe_flex_dispatcher_backend),
        "replaced": replaced,
        "verified": plugin.verify(model),
        "verified chunks": plugin.verify([model, model]),
        "buffers": len(plugin.buffers()),
        "one buffer": len({id(layer.token_dispatcher.buffer) for layer in layers}),
        "described": "dispatch_dtype" in plugin.describe(),
        "again": plugin.enable(**_options()),
        "other options": _error(lambda: plugin.enable(num_sms=3)),
        "no reuse": _error(lambda: plugin.enable(**_options(), reuse_plans_in_recompute=False)),
    }
    plugin.disable()
    result["restored"] = stock == _patched_names()
    result["our name after"] = transformer_config(case, named).moe_token_dispatcher_type
    result["buffers after"] = len(plugin.buffers())
    result["used after"] = _error(lambda: model(*_inputs(case)))
    return result


def _patched_names() -> tuple[Any, ...]:
    return (
        moe_layer.MoEFlexTokenDispatcher,
        moe_layer.MoELayer.__init__,
        TransformerConfig.__post_init__,
        random.CheckpointFunction.forward,
        random.CheckpointWithoutOutput.checkpoint,
        torch.utils.checkpoint.CheckpointFunction.forward,
        torch.utils.checkpoint._checkpoint_hook,
    )


def _options() -> dict[str, Any]:
    assert plugin._enabled is not None
    return plugin._enabled.pool.options


def _inputs(case: TrainCase) -> tuple[torch.Tensor, torch.Tensor, None]:
    tokens = next(batches_of(case, 0))[:, :-1]
    return tokens, torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1), None


def replayed_steps(rank: int) -> dict[str, Any]:
    """An optimizer in a CUDA graph: a stand-in for Megatron's wrapper; replays run none of torch's hooks."""
    case = TrainCase()
    _fresh(case)
    stand_in = types.ModuleType("megatron.core.optimizer.optimizer_cuda_graph")
    replays = []

    class OptimizerCudaGraphWrapper:
        def __call__(self) -> None:
            replays.append(1)

    stand_in.OptimizerCudaGraphWrapper = OptimizerCudaGraphWrapper  # type: ignore[attr-defined]
    replaced = sys.modules.get(stand_in.__name__)
    sys.modules[stand_in.__name__] = stand_in
    try:
        model, _, _ = build(case)
        model(*_inputs(case))
        step = OptimizerCudaGraphWrapper()
        found: dict[str, Any] = {"good": (_error(step), len(replays))}
        (buffer,) = plugin.buffers()
        dist.barrier()  # nobody fails before all have taken a good step
        if rank == 0:
            buffer._engine.fail("on purpose")
        deadline = time.monotonic() + 20
        while not _error(buffer._engine.check)[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        found["failed"] = (_error(step)[0], len(replays))
        plugin.disable()
        found["disabled"] = (_error(step), len(replays))
    finally:
        del sys.modules[stand_in.__name__]
        if replaced is not None:
            sys.modules[stand_in.__name__] = replaced
    return found


def alignments(rank: int) -> dict[str, int]:
    """Rows to which each expert's segment is padded, by what Megatron's configuration asks for."""
    case = TrainCase()
    _fresh(case)
    model, _, _ = build(case)
    (layer, *_) = moe_layers(model)
    config = transformer_config(case, {})
    found = {"bf16": layer.token_dispatcher._comm_manager.expert_alignment}
    with unittest.mock.patch.object(dispatcher, "get_align_size_for_quantization", lambda config: 256):
        for name in ("fp8", "moe_use_grouped_tensor"):
            changed = copy.copy(config)
            object.__setattr__(changed, name, True)
            manager = dispatcher.UcclEpManager(layer.token_dispatcher.buffer, config.num_moe_experts, changed)
            found[name] = manager.expert_alignment
    plugin.disable()
    return found


def refusals(rank: int) -> dict[str, tuple[str, str]]:
    """The ways in which our dispatcher could be missing, or be asked for what cannot work."""
    case = TrainCase()
    _fresh(case)
    stock_model, _, _ = build(dataclasses.replace(case, dispatcher="alltoall"))
    found = {"built before": _error(lambda: plugin.verify(stock_model))}
    found["no MoE layer"] = _error(lambda: plugin.verify(torch.nn.Linear(2, 2)))
    plugin.enable(dispatch_dtype="bf16")
    found["other carrier"] = _error(lambda: build(dataclasses.replace(case, dispatcher="alltoall")))
    plugin.disable()
    found["fp8 rows of fp32"] = _error(lambda: build(_with(case, options={"dispatch_dtype": "fp8"})))
    plugin.disable()
    found["model's option"] = _error(lambda: plugin.enable(hidden=256))
    found["bad option"] = _error(lambda: plugin.enable(dispatch_dtype="int4"))
    found["reuse"] = _error(lambda: plugin.enable(reuse_plans_in_recompute=1))
    found["unknown option"] = _error(lambda: plugin.enable(colour="blue"))
    plugin.disable()
    return found


def _with(case: TrainCase, **changes: Any) -> TrainCase:
    return dataclasses.replace(case, **changes)


def unknown_megatron(rank: int) -> dict[str, Any]:
    """A Megatron whose dispatcher takes other arguments, and one without a stage."""
    plugin.disable()
    flex, before = token_dispatcher.MoEFlexTokenDispatcher, moe_layer.MoEFlexTokenDispatcher
    stock_init, stock_stage = flex.__init__, token_dispatcher.MoETokenDispatcher.token_combine

    def other_init(self: Any, config: Any, layer_number: int) -> None: ...

    try:
        flex.__init__ = other_init
        arguments = _error(plugin.enable)
        flex.__init__ = stock_init
        own = flex.token_combine
        del flex.token_combine, token_dispatcher.MoETokenDispatcher.token_combine
        stage = _error(plugin.enable)
    finally:
        flex.__init__ = stock_init
        flex.token_combine, token_dispatcher.MoETokenDispatcher.token_combine = own, stock_stage
    return {
        "arguments": arguments,
        "stage": stage,
        "unchanged": moe_layer.MoEFlexTokenDispatcher is before and not plugin.is_enabled(),
    }


def alone(rank: int) -> list[str]:
    """With an expert group of one rank nothing is to be dispatched: Megatron's own class, and it verifies."""
    case = TrainCase(ep=1)
    _fresh(case)
    model, _, _ = build(case)
    assert plugin.verify(model) == case.layers and not plugin.buffers()
    # Experts pad for FP8 by the name in the configuration.
    assert {layer.config.moe_token_dispatcher_type for layer in moe_layers(model)} == {"alltoall"}
    plugin.disable()
    return [type(layer.token_dispatcher).__name__ for layer in moe_layers(model)]


def freed_inputs(rank: int) -> dict[str, bool]:
    """Which stage inputs the 1F1B schedule would free, with our carrier and as all-to-all."""
    try:
        from megatron.core.models.common.utils import should_free_input
    except ImportError:  # its home up to 0.18
        from megatron.core.models.gpt.fine_grained_callables import should_free_input
    named = inspect.signature(should_free_input).parameters
    more = {"num_local_experts": 2} if "num_local_experts" in named else {}  # from 0.17 on
    case = TrainCase(dtype="bf16", config={"overlap_moe_expert_parallel_comm": True})
    _fresh(case)
    ours = transformer_config(case, dict(plugin.CARRIER))
    stock = transformer_config(case, {"moe_token_dispatcher_type": "alltoall"})
    return {
        f"{name}, {who}": should_free_input(name, True, config, **more)
        for who, config in (("ours", ours), ("alltoall", stock))
        for name in ("moe_dispatch", "mlp")
    }


def recomputation_with_other_routing(rank: int, on_rank: int, checked: bool) -> tuple[str, str]:
    """The error of a step whose recomputed routing differs on one rank. Not `checked`: no plan is reused."""
    case = TrainCase(config=FULL, options={"reuse_plans_in_recompute": checked})
    _fresh(case)
    model, optimizer, _ = build(case)
    manager: Any = moe_layers(model)[0].token_dispatcher._comm_manager
    stock = manager.dispatch

    def dispatch(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and rank == on_rank:
            manager.routing_map = manager.routing_map.roll(1, dims=1)
        rows = stock(hidden, *args)
        # A GPU shows the error to the next call. By then all ranks should know it: who has gone on to a
        # collective of NCCL waits there for those that raise.
        devices.synchronize()
        return rows

    manager.dispatch = dispatch
    before = [p.detach().clone() for p in model.parameters()]
    found = _error(lambda: train_step(case, [model], optimizer, 0))
    if found[0]:
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same, "an optimizer step was applied after the error"
    plugin.disable()
    return found
