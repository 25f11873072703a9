"""A captured graph of a dispatch and a combine, replayed with ever new routings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.bits import bit_difference
from tests.cases import NO_CAPACITY, Case, EngineSpec, make_case, with_inputs
from uccl_ep_train import Buffer
from uccl_ep_train.oracle.reference import Dispatched

CAPACITY_PER_TOKEN = 2  # each names two experts


def changing_cases(spec: EngineSpec, num_tokens: Sequence[int], count: int = 20) -> list[Case]:
    """Of one form and size, with other experts and rows each."""
    first = make_case(5, spec, num_tokens=num_tokens, hidden=512, dtype=torch.bfloat16, form="topk", top_k=2,
                      dispatch_dtype="fp8", weighted=True, drop_rate=0.0, special=False,
                      capacity=NO_CAPACITY, layout="expert_major", expert_alignment=1)  # fmt: skip
    changed = [
        with_inputs(
            first,
            lambda rank, entry, i=i: replace(
                entry, topk_idx=(entry.topk_idx + i) % spec.num_experts, x=entry.x * i
            ),
        )
        for i in range(1, count)
    ]
    return [first, *changed]


def what_comes(cases: Sequence[Case]) -> list[tuple[Dispatched, list[torch.Tensor]]]:
    """By case: what the oracle dispatches, and the sums of these rows."""
    wanted = []
    for case in cases:
        oracle = case.spec.oracle()
        routings = [entry.routing(case.spec.num_experts) for entry in case.inputs]
        dispatched = oracle.dispatch([entry.x for entry in case.inputs], routings, dispatch_dtype="fp8")
        wanted.append((dispatched, oracle.combine(dispatched.rows, dispatched.plan).outputs))
    return wanted


def replay(
    rank: int,
    buffer: Buffer,
    cases: Sequence[Case],
    wanted: Sequence[tuple[Dispatched, list[torch.Tensor]]],
    turns: int = 3,
) -> list[str]:
    """Captures once, replays each case `turns` times; what is wrong."""
    given = cases[0].inputs[rank].on(buffer.device)
    assert given.topk_idx is not None and given.topk_weights is not None
    capacity = CAPACITY_PER_TOKEN * sum(len(entry.x) for entry in cases[0].inputs) + 8
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = buffer.dispatch(given.x, given.topk_idx, given.topk_weights, capacity=capacity,
                                 pad_to_capacity=True, dispatch_dtype="fp8")  # fmt: skip
        out = buffer.combine(result.rows, result.handle)
    found = []
    for turn in range(turns):
        for i, (case, (dispatched, outputs)) in enumerate(zip(cases, wanted, strict=True)):
            new = case.inputs[rank]
            assert new.topk_idx is not None and new.topk_weights is not None
            given.x.copy_(new.x)
            given.topk_idx.copy_(new.topk_idx)
            given.topk_weights.copy_(new.topk_weights)
            if i % 3 == 0:
                buffer.wake()
            graph.replay()
            torch.cuda.synchronize()
            buffer.check()
            num_rows = len(dispatched.rows[rank])
            seen = [
                "" if not result.overflow else "overflow",
                "" if result.tokens_per_expert.sum() == num_rows else "counts",
                bit_difference(result.rows[:num_rows].cpu(), dispatched.rows[rank]),
                "" if result.rows[num_rows:].eq(0).all() else "padding",
                bit_difference(out.cpu(), outputs[rank]),
            ]
            found += [f"rank {rank}, turn {turn}, case {i}: {line}" for line in seen if line]
    return found
