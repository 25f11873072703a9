"""Runs on the ranks: train a small GPT-MoE with a dispatcher, and say what came out bit by bit."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from recipes.plan import devices
from tests.megatron.settings import Outcome, TrainCase
from uccl_ep_train.megatron import plugin

VOCAB, SEQUENCE, MICRO_BATCH, HIDDEN = 64, 32, 2, 128
BUDGET_BYTES = 32 << 20


def digest(*tensors: torch.Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


_layout: tuple[int, ...] | None = None


def initialize(tp: int = 1, ep: int = 4, etp: int = 1, pp: int = 1, chunks: int = 1) -> None:
    """Process groups of a layout; the ranks go from one to the next. `chunks`: of the model, on each rank.

    Megatron forgets its groups without destroying them; three threads of each would pile up.
    """
    global _layout
    layout = (tp, ep, etp, pp, chunks)
    if _layout == layout and parallel_state.model_parallel_is_initialized():
        return
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    _layout = layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )


def carrier_of(dispatcher: str, options: dict[str, Any]) -> dict[str, Any]:
    if dispatcher != "uccl_ep":
        return {"moe_token_dispatcher_type": dispatcher}
    defaults: dict[str, Any] = {
        "dispatch_dtype": "bf16",
        "budget_bytes": BUDGET_BYTES,
        "transport": "loop",
        "domain_size": 2,
    }
    return plugin.enable(**(defaults | options))


def transformer_config(case: TrainCase, carrier: dict[str, Any]) -> TransformerConfig:
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    defaults: dict[str, Any] = {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "add_bias_linear": False,
    }
    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=64,
        num_moe_experts=case.experts,
        moe_router_topk=case.topk,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.tp > 1,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=case.dtype == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        # On a GPU the gradient of the embedding is otherwise a sum in any order. The rest needs nothing: what
        # Megatron's unpermute adds there by atomics are the two rows of a token, equal in either order.
        deterministic_mode=devices.own().type == "cuda",
        **(defaults | carrier | case.config),
    )


def _build_chunk(case: TrainCase, config: TransformerConfig, number: int) -> Any:
    virtual = number if case.chunks > 1 else None
    gpt: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=case.experts, moe_grouped_gemm=False),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=case.pp == 1 and not config.overlap_moe_expert_parallel_comm,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        vp_stage=virtual,
    ).to(devices.own())
    if case.dtype == "bf16":
        gpt = Float16Module(config, gpt)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=case.dist_opt
    )
    model = DistributedDataParallel(config, ddp_config, gpt)
    model.broadcast_params()
    return model


def build_chunks(case: TrainCase) -> tuple[list[Any], Any, TransformerConfig]:
    """The wrapped chunks of the model, their optimizer and their config."""
    torch.manual_seed(case.seed)
    model_parallel_cuda_manual_seed(case.seed)
    config = transformer_config(case, carrier_of(case.dispatcher, case.options))
    chunks = [_build_chunk(case, config, number) for number in range(case.chunks)]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=1.0,
        bf16=case.dtype == "bf16",
        params_dtype=config.params_dtype,
        use_distributed_optimizer=case.dist_opt,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    return chunks, optimizer, config


def build(case: TrainCase) -> tuple[Any, Any, TransformerConfig]:
    """The same of a model in one piece."""
    (model,), optimizer, config = build_chunks(case)
    return model, optimizer, config


def moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    return [m for m in model.modules() if isinstance(m, MoELayer)]


def _loss(labels: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _forward(batches: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> Any:
    batch = next(batches)
    tokens = batch["tokens"] if isinstance(batch, dict) else batch
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(MICRO_BATCH, -1)
    if return_schedule_plan:
        plan = model.build_schedule_plan(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return plan, partial(_loss, tokens[:, 1:])
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), partial(_loss, tokens[:, 1:])


def batches_of(case: TrainCase, step: int) -> Iterator[torch.Tensor]:
    """Learnable text: counting with a stride that the data parallel rank's seed chooses."""
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for _ in range(case.num_microbatches):
        start = torch.randint(VOCAB, (MICRO_BATCH, 1), generator=generator)
        stride = torch.randint(1, 5, (MICRO_BATCH, 1), generator=generator)
        yield ((start + stride * torch.arange(SEQUENCE + 1)) % VOCAB).to(devices.own())


def train_step(
    case: TrainCase, chunks: list[Any], optimizer: Any, step: int, whole: Callable[..., Any] | None = None
) -> float:
    """Sum of the micro-batches' losses; 0 but on the last pipeline stage.

    whole  instead of Megatron's schedule; it takes batches by name, and leaves gradients to be summed
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    batches: list[Iterator[Any]] = [batches_of(case, step) for _ in chunks]
    if whole is not None:
        batches = [iter([{"tokens": tokens} for tokens in of]) for of in batches]
    reduced = (whole or get_forward_backward_func())(
        forward_step_func=_forward,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=chunks,
        num_microbatches=case.num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    if whole is not None:
        finalize_model_grads(chunks)
    optimizer.step()
    return sum(float(r["loss"]) for r in reduced)


def change_dispatcher(rank: int, case: TrainCase, first: str) -> tuple[str, bool]:
    """Half of the steps with the dispatcher `first`, and the rest with the other of the two from its state.

    The weights at the end, and whether a distributed checkpoint of Megatron's has the same shards of both.
    """
    initialize(case.tp, case.ep, case.etp)
    state: Any = None
    shards = []
    second = "uccl_ep" if first == "alltoall" else "alltoall"
    for turn, dispatcher in enumerate((first, second)):
        plugin.disable()
        options = case.options if dispatcher == "uccl_ep" else {}
        model, optimizer, _ = build(
            dataclasses.replace(case, dispatcher=dispatcher, options=options, seed=case.seed + 100 * turn)
        )
        if turn:  # weights of another seed go
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(turn * case.steps // 2, (turn + 1) * case.steps // 2):
            train_step(case, [model], optimizer, step)
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        # Name, shape, offsets and replica of each; the tensors themselves are not looked at.
        shards.append(
            {
                key: dataclasses.replace(shard, data=None)
                if dataclasses.is_dataclass(shard) and not isinstance(shard, type)
                else None
                for key, shard in model.sharded_state_dict().items()
            }
        )
    plugin.disable()
    dist.barrier()
    return digest(*model.parameters()), shards[0] == shards[1]


def gradient_distance(rank: int, case: TrainCase) -> tuple[float, float]:
    """From equal states, ours against stock: relative distance of the losses and of the gradients."""
    initialize(case.tp, case.ep, case.etp)
    found = []
    for dispatcher in ("alltoall", "uccl_ep"):
        plugin.disable()
        model, optimizer, _ = build(dataclasses.replace(case, dispatcher=dispatcher))
        if dispatcher == "uccl_ep" and case.corrupt:
            _corrupt(case.corrupt, moe_layers(model)[0])
        loss = train_step(case, [model], optimizer, 0)
        found.append((loss, torch.cat([p.main_grad.flatten().double() for p in model.parameters()])))
    plugin.disable()
    dist.barrier()
    (stock_loss, stock), (loss, ours) = found
    return abs(loss - stock_loss) / stock_loss, float((ours - stock).norm() / stock.norm())


def _record_expert_inputs(layer: MoELayer, into: list[str]) -> None:
    stock = layer.experts.forward

    def forward(rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> Any:
        into.append(digest(rows, tokens_per_expert, probs))
        return stock(rows, tokens_per_expert, probs)

    layer.experts.forward = forward


def _corrupt(kind: str, layer: MoELayer) -> None:
    """Faults that a test has to notice: they prove that it can."""
    manager: Any = layer.token_dispatcher._comm_manager
    stock = manager.dispatch

    def dispatch(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        if kind == "zero_prob_grad":
            manager.token_probs = manager.token_probs.detach()
        rows = stock(hidden, *args)
        if kind == "zero_row" and rows.shape[0]:
            keep = rows.new_ones(rows.shape[0], 1)
            keep[0] = 0
            rows = rows * keep
        return rows

    manager.dispatch = dispatch


def train(rank: int, case: TrainCase, probe: Callable[[Any], dict[str, Any]] | None = None) -> Outcome:
    """`case.steps` steps from the case's seed; collective."""
    initialize(case.tp, case.ep, case.etp, case.pp, case.chunks)
    plugin.disable()
    try:
        chunks, optimizer, _ = build_chunks(case)
        layers = [layer for chunk in chunks for layer in moe_layers(chunk)]
        if case.dispatcher == "uccl_ep":
            assert plugin.verify(chunks) == case.layers // case.pp
        if case.corrupt:
            _corrupt(case.corrupt, layers[0])
        inputs: list[str] = []
        _record_expert_inputs(layers[0], inputs)
        losses, after_step = [], []
        for step in range(case.steps):
            losses.append(train_step(case, chunks, optimizer, step))
            after_step.append(digest(*(p for chunk in chunks for p in chunk.parameters())))
        return Outcome(
            losses=tuple(losses),
            parameters=after_step[-1],
            step_parameters=tuple(after_step),
            expert_inputs=tuple(inputs),
            dispatchers=tuple(type(layer.token_dispatcher).__name__ for layer in layers),
            stats=plugin.buffers()[0].stats() if plugin.buffers() else {},
            probe=probe(chunks[0]) if probe else {},
        )
    finally:
        plugin.disable()
        dist.barrier()
