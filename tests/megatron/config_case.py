"""Runs on the ranks: what becomes of a TransformerConfig that is changed, shared, or made too early."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference import utils as inference
from megatron.core.transformer.transformer_config import TransformerConfig

from recipes.plan import devices
from tests.megatron import training_case
from tests.megatron.settings import TrainCase
from tests.megatron.training_case import HIDDEN, build, initialize, moe_layers, train_step
from uccl_ep_train.errors import EpError
from uccl_ep_train.megatron import dispatcher, plugin


def _error(action: Any) -> tuple[str, str]:
    """(class name, message) of what `action` raises; two empty strings if nothing."""
    try:
        action()
    except (EpError, ValueError) as error:  # Megatron's own
        return type(error).__name__, str(error)
    return "", ""


CHANGES: tuple[tuple[bool, float | None], ...] = ((True, 4.0), (True, 1.0), (False, None), (False, 0.5))


def capacities(rank: int, kind: str) -> dict[str, Any]:
    """Outputs of a layer, and the capacity of each dispatch, while Megatron changes the padding of experts.

    It is as in a CUDA graph, where the host knows counts of padded experts alone.
    """
    initialize()
    plugin.disable()
    inference.moe_layer_cache = None
    model, _, config = build(TrainCase(dispatcher=kind))
    layer: Any = moe_layers(model.eval())[0]
    found: dict[str, Any] = {"capacities": [], "outputs": [], "config": ("", "")}
    if kind == "uccl_ep":
        buffer = layer.token_dispatcher.buffer
        stock = buffer.dispatch
        buffer.dispatch = lambda **given: (found["capacities"].append(given["capacity"]), stock(**given))[1]
    torch.manual_seed(rank)
    hidden = torch.randn(16, 2, HIDDEN).to(devices.own())
    with torch.no_grad():
        for padded, factor in CHANGES:
            inference.set_decode_expert_padding(model.module, padded, capacity_factor=factor)
            with mock.patch.object(dispatcher, "is_capturing", lambda now=padded: now):
                out = layer(hidden)[0]
            found["outputs"].append(training_case.digest(out))
        if kind == "uccl_ep":
            config.moe_pad_expert_input_to_capacity, config.moe_expert_capacity_factor = True, None
            found["config"] = _error(lambda: layer(hidden))
    inference.moe_layer_cache = None
    plugin.disable()
    dist.barrier()
    return found


def read_anew(rank: int) -> dict[str, Any]:
    """What a manager makes of fields that change after it was built."""
    initialize()
    plugin.disable()
    model, _, config = build(TrainCase())
    manager = moe_layers(model)[0].token_dispatcher._comm_manager
    found = {"before": (manager.pads_map, manager.expert_alignment, manager._topk)}
    config.moe_router_padding_for_quantization, config.moe_router_topk = True, 3
    found["after"] = (manager.pads_map, manager.expert_alignment, manager._topk)
    plugin.disable()
    return found


def other_carriers(rank: int) -> dict[str, tuple[str, str]]:
    """A flex dispatcher of another back end while the plug-in is enabled, and a config made before it was."""
    initialize()
    plugin.disable()
    case = TrainCase()
    early = training_case.transformer_config(case, {"moe_token_dispatcher_type": "uccl_ep"})
    carrier = training_case.carrier_of("uccl_ep", {})
    deepep = training_case.transformer_config(case, {"moe_token_dispatcher_type": "flex"})
    found = {
        "by default": _error(lambda: training_case._build_chunk(case, deepep, 0)),
        "made before": _error(lambda: training_case._build_chunk(case, early, 0)),
    }
    config = training_case.transformer_config(case, carrier)
    model = training_case._build_chunk(case, config, 0)
    found["ours"] = _error(lambda: plugin.verify(model))
    config.moe_flex_dispatcher_backend = "deepep"
    found["changed"] = _error(lambda: plugin.verify(model))
    plugin.disable()
    dist.barrier()
    return found


def said_of_the_router(rank: int, dtype: str) -> list[str]:
    """What two models print whose router computes in `dtype`."""
    initialize()
    plugin.disable()
    dispatcher._say_what_fp64_becomes.cache_clear()
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        models = [build(TrainCase(config={"moe_router_dtype": dtype})) for _ in range(2)]
    del models
    plugin.disable()
    return [line for line in told.getvalue().splitlines() if "moe_router_dtype" in line]


def forgotten_groups(rank: int) -> dict[str, Any]:
    """As `destroy_model_parallel` leaves them: torch has them, too, while a model of before lives or not."""
    plugin.disable()
    initialize()
    case = TrainCase()
    model, optimizer = build(case)[:2]  # the config has the model, too
    loss = train_step(case, [model], optimizer, 0)
    (first,) = plugin.buffers()
    _megatron_groups(2)
    other = dataclasses.replace(case, ep=2)
    second_model = build(other)[0]
    found: dict[str, Any] = {"in use": (first.closed, len(plugin.buffers()))}
    del model, optimizer, second_model
    _megatron_groups(4)
    model, optimizer = build(case)[:2]
    found["unused"] = (first.closed, len(plugin.buffers()))
    found["same loss"] = train_step(case, [model], optimizer, 0) == loss
    del model, optimizer
    _megatron_groups(1)
    build(dataclasses.replace(case, ep=1))
    found["alone"] = len(plugin.buffers())
    plugin.disable()
    dist.barrier()
    training_case._layout = (0,)  # the next case makes groups of its own
    return found


def dropped_by_another(rank: int) -> dict[str, Any]:
    """One rank drops a forgotten buffer; the others, which make no new one, go on with their optimizers."""
    plugin.disable()
    initialize()
    model, optimizer = build(TrainCase())[:2]
    (buffer,) = plugin.buffers()
    del model, optimizer
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    sgd = torch.optim.SGD([parameter])
    dist.barrier()
    if rank == 0:
        buffer._engine.fail("on purpose")
    for _ in range(2000):
        if _error(buffer.check)[0]:
            break
        time.sleep(0.01)
    found: dict[str, Any] = {"before": _error(sgd.step)[0]}
    dist.barrier()
    _megatron_groups(4)
    found["after"] = _error(sgd.step)[0]
    found["closed"] = buffer.closed
    plugin.disable()
    dist.barrier()
    training_case._layout = (0,)
    return found


def _megatron_groups(ep: int) -> None:
    """As a user makes them anew."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    gc.collect()


def shared_config(rank: int) -> dict[str, Any]:
    """One config for a model of which each rank has all experts, then for one over four ranks."""
    plugin.disable()
    initialize(ep=1)
    case = TrainCase(ep=1)
    config = training_case.transformer_config(case, training_case.carrier_of("uccl_ep", {}))
    before = dict(vars(config))
    model = training_case._build_chunk(case, config, 0)
    layer = moe_layers(model)[0]
    found: dict[str, Any] = {"unchanged": vars(config) == before}
    found["names"] = (config.moe_token_dispatcher_type, layer.config.moe_token_dispatcher_type)
    config.moe_expert_capacity_factor = 1.5
    layer.config.moe_z_loss_coeff = 0.25
    found["shared"] = (layer.config.moe_expert_capacity_factor, config.moe_z_loss_coeff)
    config.moe_expert_capacity_factor = config.moe_z_loss_coeff = None
    whole, view = copy.deepcopy((config, layer.config))
    whole.moe_router_topk = 7
    found["copied"] = (view.moe_token_dispatcher_type, view.moe_router_topk, config.moe_router_topk)
    found["pickled"] = pickle.loads(pickle.dumps(_plain(view))).moe_token_dispatcher_type
    found["class"] = isinstance(layer.config, TransformerConfig)
    initialize(ep=4)
    config.expert_model_parallel_size = 4
    found["verified"] = plugin.verify(training_case._build_chunk(TrainCase(), config, 0))
    plugin.disable()
    dist.barrier()
    return found


def _plain(config: Any) -> Any:
    """Without the functions that cannot be pickled."""
    for name, value in list(vars(config).items()):
        if callable(value):
            setattr(config, name, None)
    return config
