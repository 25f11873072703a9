"""Runs on the ranks: trains with and without Megatron's CUDA graphs of the router."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.megatron.settings import TrainCase
from tests.megatron.training_case import (
    MICRO_BATCH,
    SEQUENCE,
    build,
    digest,
    initialize,
    moe_layers,
    train_step,
)
from uccl_ep_train.megatron import plugin

WARMUP = 2  # steps before the graphs are captured
STEPS = 6
PADDED = {
    "moe_expert_capacity_factor": 0.75,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_drop_policy": "probs",
}


def train(
    rank: int, dispatcher: str, modules: list[str], forget: bool = False, padded: bool = False
) -> tuple[tuple[float, ...], str, int]:
    """Losses, a digest of the weights, and how often graphs were replayed.

    modules  what is captured; none: no graphs
    forget   what `dispatch_preprocess` leaves on the manager is not told to Megatron
    padded   each expert gets alike
    """
    ranks = dist.get_world_size()
    initialize(1, ranks, 1)
    settings = (_graphs(modules) if modules else {}) | (PADDED if padded else {})
    case = TrainCase(dispatcher=dispatcher, dtype="bf16", ep=ranks, steps=STEPS, config=settings)
    plugin.disable()
    init_num_microbatches_calculator(
        rank, None, MICRO_BATCH * ranks * case.num_microbatches, MICRO_BATCH, ranks, False
    )
    try:
        # Gradients are summed on the stream on which the wrapper was made; the default one is not captured.
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            model, optimizer, config = build(case)
        torch.cuda.current_stream().wait_stream(aside)
        if forget:
            for layer in moe_layers(model):
                layer.token_dispatcher.cudagraph_attrs = []
        replays: list[int] = []
        losses = []
        for step in range(STEPS):
            if modules and step == WARMUP:
                helper = TECudaGraphHelper([model], config, SEQUENCE, MICRO_BATCH, [optimizer])
                helper.create_cudagraphs()
                _count(helper, replays)
            losses.append(train_step(case, [model], optimizer, step))
        return tuple(losses), digest(*model.parameters()), len(replays)
    finally:
        destroy_num_microbatches_calculator()
        plugin.disable()
        dist.barrier()


def train_whole(
    rank: int, graphed: bool, padded: bool = True, domain_size: int = 2
) -> tuple[tuple[float, ...], str, int]:
    """As `train`, with all micro-batches of a step, forward and backward, in one graph."""
    ranks = dist.get_world_size()
    initialize(1, ranks, 1)
    options = {"domain_size": min(domain_size, ranks)}
    case = TrainCase(dtype="bf16", ep=ranks, steps=STEPS, config=PADDED if padded else {}, options=options)
    plugin.disable()
    initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    warmup = WARMUP if graphed else STEPS
    schedule = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=warmup)
    try:
        # Gradients are summed on the stream on which the wrapper was made; the default one is not captured.
        with torch.cuda.stream(torch.cuda.Stream()):
            model, optimizer, config = build(case)
        torch.cuda.synchronize()
        config.finalize_model_grads_func = None
        losses = [train_step(case, [model], optimizer, step, schedule) for step in range(STEPS)]
        return tuple(losses), digest(*model.parameters()), int(schedule.cuda_graph["training"] is not None)
    finally:
        schedule.reset_cuda_graph()
        StaticBufferLoader.static_buffers["training"].clear()
        initialize_rng_tracker(force_reset=True)
        plugin.disable()
        dist.barrier()


def _graphs(modules: list[str]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    name = "cuda_graph_modules" if "cuda_graph_modules" in known else "cuda_graph_scope"  # its former name
    return {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_warmup_steps": WARMUP,
        name: modules,
    }


def _count(helper: TECudaGraphHelper, replays: list[int]) -> None:
    for layer in helper.flattened_callables:
        for number, graph in enumerate(layer.cuda_graphs):

            def replay(*args: Any, _graph: Any = graph, _number: int = number, **kwargs: Any) -> Any:
                replays.append(_number)
                return _graph(*args, **kwargs)

            layer.cuda_graphs[number] = replay
