"""Runs on the ranks: training that fails, and training anew in the same processes."""

from __future__ import annotations

import datetime
import gc
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from tests.megatron import training_case
from tests.megatron.settings import TrainCase
from tests.megatron.training_case import build, initialize, moe_layers, train_step
from uccl_ep_train.megatron import plugin

MINUTE = datetime.timedelta(seconds=60)


def _new_groups(rank: int, port: int, generation: str) -> None:
    """All groups are destroyed, the default one, too, and made anew."""
    size = dist.get_world_size()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    training_case._layout = None
    store = dist.PrefixStore(generation, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=MINUTE))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=MINUTE)
    initialize()


def restart(rank: int, port: int, generation: str, way: str) -> dict[str, Any]:
    """Losses before and after, the error in between, and what is left.

    way: "disable" before the groups go, "enable" again as a launcher does, "other options": with other ones
    """
    plugin.disable()
    initialize()
    case = TrainCase()
    model, optimizer, _ = build(case)
    found: dict[str, Any] = {"before": [train_step(case, [model], optimizer, step) for step in range(2)]}
    old = plugin.buffers()[0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("on purpose")

    if rank == 1:
        moe_layers(model)[0].experts.forward = fails
    try:
        train_step(case, [model], optimizer, 2)
    except Exception as error:
        found["error"] = type(error).__name__
    if rank == 1:  # nobody shall wait for its operations
        old.close(abort=True)
    try:
        optimizer.step()
    except Exception as error:
        found["step"] = type(error).__name__
    del model, optimizer
    gc.collect()
    if way == "disable":
        plugin.disable()
    _new_groups(rank, port, generation)
    try:
        options = {"num_sms": 2} if way == "other options" else {}
        case = TrainCase(options=options)
        model, optimizer, _ = build(case)
        found["after"] = [train_step(case, [model], optimizer, step) for step in range(2)]
        found["buffers"] = len(plugin.buffers())
        found["old closed"] = old.closed
    finally:
        plugin.disable()
        dist.barrier()
    return found
