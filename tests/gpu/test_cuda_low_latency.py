"""Low latency on GPUs: graphs.

All else: `tests/unit/test_low_latency*.py --backend cuda`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.bits import bit_difference
from tests.cases import EngineSpec
from tests.low_latency import ROOM, E, Given, H, give, settle, slot_differences, told
from tests.machine import needs_gpus
from uccl_ep_train import Buffer
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.errors import InputError

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(2),
]


def spec_of(*settings: tuple[str, Any]) -> EngineSpec:
    return EngineSpec(
        domains=(0, 0), num_experts=E, hidden=H, settings=(("backend", "cuda"), *ROOM, *settings)
    )


def replay(rank: int, buffer: Buffer, worlds: list[Given], spec: EngineSpec, early: bool) -> None:
    """A graph of a dispatch and a combine, in two halves each, with ever new inputs. early: the dispatch has
    the weights
    """
    calls, stream = LowLatency(buffer), torch.cuda.Stream()
    x, topk_idx, weights, outputs = given_like = worlds[0].on(rank, buffer.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        sent = calls.send_dispatch(x, topk_idx, weights if early else None, wire="bf16")
        got = sent.receive()
        out = calls.send_combine(outputs, *told(early, topk_idx, weights), got.handle).receive()
    for given in [*worlds, *worlds]:
        for to, new in zip(given_like, given.on(rank, buffer.device), strict=True):
            to.copy_(new)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        settle(buffer)
        assert not slot_differences(got, given.sent()[rank])
        assert not bit_difference(out.cpu(), given.sums(spec)[rank])


@pytest.mark.parametrize("early", [False, True])
def test_replays_of_a_graph_follow_the_routing(early: bool) -> None:
    spec = spec_of(("low_latency_fold_pairs", 0))
    worlds = [give(spec, seed=seed) for seed in range(3)]
    with spec.group() as group:
        group.run(lambda rank, buffer: replay(rank, buffer, worlds, spec, early))


def test_a_receive_outside_its_graph_is_refused() -> None:
    spec = spec_of()
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, (x, topk_idx, *_) = LowLatency(buffer), given.on(rank, buffer.device)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                sent = calls.send_dispatch(x, topk_idx)
            with pytest.raises(InputError, match="not captured in the graph"):
                sent.receive()

        group.run(step)
