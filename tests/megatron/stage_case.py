"""Runs on the ranks: the same tokens through Megatron's all-to-all dispatcher and ours, stage by stage."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from recipes.plan import devices
from tests.megatron.settings import StageCase
from tests.megatron.training_case import carrier_of, initialize
from uccl_ep_train import deep_ep
from uccl_ep_train.megatron import buffers, plugin
from uccl_ep_train.megatron import dispatcher as our_stages

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def compare(rank: int, case: StageCase) -> dict[str, float]:
    """By name of the tensor (see `_through`): 0.0 if bitwise equal, else the largest relative difference."""
    initialize(case.tp, case.ep, case.etp)
    plugin.disable()
    stock_order = buffers.stock_source_order
    try:
        stock = _through(case, _dispatcher(case, "alltoall"), rank, "")
        ours = _through(case, _dispatcher(case, "uccl_ep"), rank, case.corrupt)
        return {name: _difference(stock[name], ours[name]) for name in stock}
    finally:
        buffers.stock_source_order = stock_order
        plugin.disable()
        dist.barrier()


def compare_captured(rank: int, case: StageCase) -> dict[str, float]:
    """As `compare`, of ours, with and without `captured`."""
    initialize(case.tp, case.ep, case.etp)
    plugin.disable()
    try:
        plain = _through(case, _dispatcher(case, "uccl_ep"), rank, "")
        told = dataclasses.replace(case, captured=True)
        captured = _through(told, _dispatcher(told, "uccl_ep"), rank, "")
        return {name: _difference(plain[name], captured[name]) for name in plain}
    finally:
        plugin.disable()
        dist.barrier()


def compare_deep_ep(rank: int, case: StageCase) -> dict[str, float]:
    """As `compare`, of Megatron's own flex dispatcher over the module of DeepEP's shape."""
    initialize(case.tp, case.ep, case.etp)
    plugin.disable()
    fused_a2a = _over_deep_ep()
    try:
        stock = _through(case, _dispatcher(case, "alltoall"), rank, "")
        flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
        theirs = _through(case, _dispatcher(case, "deepep", flex), rank, case.corrupt)
        assert fused_a2a._buffer.__module__ == "uccl_ep_train.deep_ep.buffer"
        return {name: _difference(stock[name], theirs[name]) for name in stock}
    finally:
        if fused_a2a._buffer is not None:
            fused_a2a._buffer.destroy()
            fused_a2a._buffer = None
        dist.barrier()


def _over_deep_ep() -> Any:
    """Megatron looks for deep_ep once, when it is imported; this process did that before."""
    deep_ep.install(replace=True)
    fused_a2a = importlib.reload(importlib.import_module("megatron.core.transformer.moe.fused_a2a"))
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
    return fused_a2a


def shared_expert_shapes(rank: int) -> dict[str, Any]:
    """What shared experts that Megatron's flex dispatcher gives rows [n,H] get, and what it gets of them."""
    case = StageCase()
    initialize(case.tp, case.ep, case.etp)
    plugin.disable()
    try:
        dispatcher = _dispatcher(case, "uccl_ep")
        shared = mock.Mock(gate_score=3)
        dispatcher.config.moe_shared_expert_overlap = True
        # As from 0.18 on; before, Megatron's raises.
        stock = token_dispatcher.MoETokenDispatcher.set_shared_experts
        with mock.patch.object(token_dispatcher.MoEFlexTokenDispatcher, "set_shared_experts", stock):
            dispatcher.set_shared_experts(shared)
        hidden, _ = _tokens(case, rank)
        rows, _ = dispatcher.dispatch_preprocess(hidden, *routing_of(case, rank))
        dispatcher.shared_experts.pre_forward_comm(rows, wait_current_stream=False)
        (given,), options = shared.pre_forward_comm.call_args
        shared.get_output.return_value = given
        return {
            "rows": list(rows.shape),
            "given": list(given.shape),
            "options": options,
            "returned": torch.equal(dispatcher.shared_experts.get_output(), rows),
            "others": dispatcher.shared_experts.gate_score,
        }
    finally:
        plugin.disable()
        dist.barrier()


def over_budget(rank: int) -> dict[str, Any]:
    """Everything goes to one rank, which has too little room; then what Megatron does after such a step."""
    case = StageCase(routing="one_expert", rank_capacity=2.0)
    initialize(case.tp, case.ep, case.etp)
    plugin.disable()
    try:
        dispatcher = _dispatcher(case, "uccl_ep")
        manager = dispatcher._comm_manager
        with torch.no_grad():
            rows, flags, required = [], [], []
            for factor, grow in ((2.0, False), (None, False), (2.0, True)):
                manager.moe_expert_rank_capacity_factor = factor
                if grow:
                    manager.grow_recv_capacity(required[0])
                manager.over_budget.fill_(0)
                hidden, _ = _tokens(case, rank)
                stage = dispatcher.dispatch_preprocess(hidden, *routing_of(case, rank))
                rows.append(dispatcher.token_dispatch(*stage)[0])
                dispatcher.token_combine(rows[-1])
                flags.append(bool(manager.over_budget))
                required.append(int(manager.required_recv))
        short, all_rows, grown = rows
        return {
            "room": [len(r) for r in rows],
            "over": flags,
            "required": required[0],
            "kept": torch.equal(short[: len(all_rows)], all_rows[: len(short)]),
            "grown": torch.equal(grown[: len(all_rows)], all_rows),
        }
    finally:
        plugin.disable()
        dist.barrier()


def sums(rank: int, case: StageCase) -> dict[str, tuple[float, float, float]]:
    """For output and hidden_grad, sums over a token's experts: (stock's error, ours, distance of the two).

    Errors are largest differences to the same sums in fp64; the distance is relative.
    """
    initialize(case.tp, case.ep, case.etp)
    plugin.disable()
    try:
        exact = _exact_sums(case, rank)
        stock = _through(case, _dispatcher(case, "alltoall"), rank, "")
        ours = _through(case, _dispatcher(case, "uccl_ep"), rank, case.corrupt)
        return {
            name: (
                float((stock[name].double() - exact[name]).abs().max()),
                float((ours[name].double() - exact[name]).abs().max()),
                _difference(stock[name], ours[name]),
            )
            for name in exact
        }
    finally:
        plugin.disable()
        dist.barrier()


def _exact_sums(case: StageCase, rank: int) -> dict[str, torch.Tensor]:
    """What each expert returns for a token, in the case's dtype, summed in fp64."""
    hidden, out_grad = _tokens(case, rank)
    routing_map, probs = routing_of(case, rank)
    token, expert = routing_map.nonzero(as_tuple=True)
    pair_rows = hidden.detach().flatten(0, 1)[token].requires_grad_()
    local = expert % (case.experts // case.ep)
    pair_out = _expert(pair_rows, local, probs[token, expert])
    pair_out.backward(out_grad.flatten(0, 1)[token])
    assert pair_rows.grad is not None
    zeros = torch.zeros_like(hidden.detach().flatten(0, 1), dtype=torch.float64)
    return {
        "output": zeros.index_add(0, token, pair_out.detach().double()).unsqueeze(1),
        "hidden_grad": zeros.index_add(0, token, pair_rows.grad.double()).unsqueeze(1),
    }


def _expert(rows: torch.Tensor, local_expert: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Stands for the experts: element-wise, another one for each local expert."""
    grown = rows * (1.0 + 0.5 * local_expert[:, None]).to(rows.dtype)
    return (grown * probs[:, None]).to(rows.dtype)


def _tokens(case: StageCase, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (a leaf) and the gradient of the output, [n,1,H]."""
    generator = torch.Generator().manual_seed(rank)
    shape = (case.tokens[rank], 1, case.hidden)
    placed = {"device": devices.own(), "dtype": DTYPES[case.dtype]}
    hidden = torch.randn(shape, generator=generator).to(**placed).requires_grad_()
    return hidden, torch.randn(shape, generator=generator).to(**placed)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype != b.dtype or a.shape != b.shape:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / a.abs().max())


def config_of(case: StageCase, carrier: dict[str, Any]) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=4,
        num_moe_experts=case.experts,
        moe_ffn_hidden_size=64,
        moe_router_topk=case.topk,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.tp > 1,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        bf16=case.dtype == "bf16",
        params_dtype=DTYPES[case.dtype],
        moe_expert_capacity_factor=case.capacity_factor,
        moe_pad_expert_input_to_capacity=case.pad_to_capacity,
        moe_token_drop_policy="probs",
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **carrier,
    )
    if case.quantization_padding:
        # Afterwards, because with FP8 the constructor wants TransformerEngine.
        config.fp8 = "e4m3"
        config.moe_router_padding_for_quantization = True
    # Also afterwards: Megatron 0.16 has no such field, later ones want TransformerEngine with it.
    config.moe_expert_rank_capacity_factor = case.rank_capacity
    return config


def _dispatcher(case: StageCase, kind: str, carrier: dict[str, Any] | None = None) -> Any:
    carrier = carrier_of(kind, case.options) if carrier is None else carrier
    local = case.experts // case.ep
    first = parallel_state.get_expert_model_parallel_rank() * local
    if case.corrupt == "rank_order":
        buffers.stock_source_order = lambda tp_size, ep_size: tuple(range(tp_size * ep_size))
    build = MoEAlltoAllTokenDispatcher if kind == "alltoall" else moe_layer.MoEFlexTokenDispatcher
    return build(
        local,
        list(range(first, first + local)),
        config=config_of(case, carrier),
        pg_collection=moe_utils.get_default_pg_collection(),
    )


def routing_of(case: StageCase, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(routing map bool [n,E], probabilities [n,E] in the router's dtype) of a rank."""
    num_tokens = case.tokens[rank]
    generator = torch.Generator().manual_seed(100 + rank)
    logits = torch.randn(num_tokens, case.experts, generator=generator, dtype=torch.float64)
    if case.routing == "one_expert":
        logits[:, : case.topk] += 100.0
    scores = torch.softmax(logits, dim=1)
    top, index = scores.topk(case.topk, dim=1)
    probs = torch.zeros_like(scores).scatter(1, index, top)
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
    if case.routing == "zero_probs":  # routed with a probability of exactly zero
        probs[::2] = 0.0
    if case.capacity_factor is not None:
        probs, routing_map = moe_utils.apply_router_token_dropping(
            probs,
            routing_map,
            router_topk=case.topk,
            capacity_factor=case.capacity_factor,
            drop_policy="probs",
            pad_to_capacity=case.pad_to_capacity,
        )
    if case.routing == "dropped":
        routing_map[::3] = False
        probs = probs * routing_map
    # The wire is fp32 as in Megatron's other flex back ends, so an fp64 router may not have more digits.
    probs = probs.float().to(DTYPES[case.router_dtype])
    return routing_map.to(devices.own()), probs.to(devices.own())


def _through(case: StageCase, dispatcher: Any, rank: int, corrupt: str) -> dict[str, torch.Tensor]:
    """All six stages with element-wise "experts", forward and backward."""
    hidden, out_grad = _tokens(case, rank)
    routing_map, probs = routing_of(case, rank)
    probs.requires_grad_()
    if corrupt == "topk_of_probs":  # what DeepEP's adapter does: the map is guessed from the probabilities
        guessed = probs.topk(case.topk, dim=1).indices
        routing_map = torch.zeros_like(routing_map).scatter(1, guessed, True)
    stage_in, stage_probs = dispatcher.dispatch_preprocess(hidden, routing_map.clone(), probs)
    if corrupt == "zero_prob_grad":
        dispatcher._comm_manager.token_probs = dispatcher._comm_manager.token_probs.detach()
    with mock.patch.object(our_stages, "is_capturing", lambda: case.captured):
        rows, row_probs = dispatcher.token_dispatch(stage_in, stage_probs)
    if hasattr(dispatcher, "before_step"):  # ours
        dispatcher.before_step()
    rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    tokens_per_expert = torch.as_tensor(tokens_per_expert).cpu()
    expert = torch.arange(len(tokens_per_expert)).repeat_interleave(tokens_per_expert).to(rows.device)
    used, room = len(expert), len(rows)  # the same, unless the rows have a budget
    rows, row_probs = rows[:used], row_probs[:used]
    expert_out = _expert(rows, expert, row_probs)
    if corrupt == "zero_row" and rows.shape[0]:
        expert_out = expert_out * (torch.arange(rows.shape[0], device=rows.device) > 0)[:, None].to(
            rows.dtype
        )
    expert_out = torch.cat([expert_out, expert_out.new_zeros(room - used, case.hidden)])
    out = dispatcher.combine_preprocess(expert_out)
    out = dispatcher.combine_postprocess(dispatcher.token_combine(out))
    out.backward(out_grad)
    probs_grad = torch.zeros_like(probs) if probs.grad is None else probs.grad
    assert hidden.grad is not None
    return {
        "rows": rows.detach(),
        "tokens_per_expert": tokens_per_expert,
        "row_probs": row_probs.detach(),
        "output": out.detach(),
        "hidden_grad": hidden.grad,
        # What the router has not chosen gets no gradient from it, whatever the dispatcher returns there.
        "probs_grad": probs_grad * routing_map,
    }
