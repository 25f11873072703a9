"""Many operations, with everything around them that a training step has. Slow; run with -m slow."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.plan import devices
from tests.cases import EngineSpec, check_case, expect, make_case
from tests.machine import needs_gpus
from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.group.bootstrap import TorchBootstrap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    needs_gpus(),
]

OPERATIONS = 10_000
ROUNDS = 10_000


def poison(device: torch.device) -> None:
    """What the allocator hands out next is not zero."""
    for size in (1 << 21, 1 << 20, 1 << 16, 1 << 12):
        torch.full((size,), torch.nan, device=device)


@pytest.mark.timeout(600)
def test_ten_thousand_random_operations_into_poisoned_memory() -> None:
    settings = (("backend", "cuda"), ("budget_bytes", 64 << 20))
    num_ranks = min(4, torch.cuda.device_count())
    spec = EngineSpec(domains=(0,) * num_ranks, num_experts=16, hidden=512, settings=settings)
    cases = [make_case(seed, spec, max_tokens=80) for seed in range(100)]
    expected = [expect(case) for case in cases]
    rng = random.Random(7)
    with spec.group() as group:
        for _ in range(OPERATIONS // 4):  # a dispatch, a combine and both backwards
            i = rng.randrange(len(cases))
            for rank in range(num_ranks):
                poison(group.buffer(rank).device)
            check_case(group, cases[i], expected[i])


E_ALL, H, K = 16, 1024, 4


def one_round(i: int, buffer: Buffer, x_TH: torch.Tensor, expected: int) -> torch.Tensor:
    """A dispatch and a combine of ones; what is wrong with them, on the device."""
    idx_TK = (torch.arange(x_TH.shape[0] * K, device=x_TH.device).reshape(-1, K) + i) % E_ALL
    result = buffer.dispatch(x_TH, idx_TK)
    wrong = result.rows.ne(1).sum()
    return wrong + buffer.combine(result.rows, result.handle).ne(expected).sum()


def capture_graphs(stop: threading.Event, device: torch.device, failures: list[str]) -> None:
    """Something else of the program captures graphs meanwhile."""
    try:
        torch.cuda.set_device(device)
        value = torch.zeros(64, device=device)
        stream = torch.cuda.Stream(device)  # one for all: torch hands out the same ones again and again
        while not stop.is_set():
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                value.add_(1)
                graph.capture_end()
            stop.wait(0.01)
    except Exception as error:
        failures.append(repr(error))


def with_everything_around(rank: Rank, rounds: int) -> int:
    device = torch.device("cuda", rank.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    nccl: Any = dist.new_group(backend="nccl")  # torch 2.15 has a type for it: perhaps no group
    config = EpConfig(num_experts=E_ALL, hidden=H, budget_bytes=64 << 20, num_sms=20, arrival_timeout_s=30.0,
                      progress_timeout_s=10.0)  # fmt: skip
    buffers = [
        Buffer(None, config, bootstrap=TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S))
        for _ in range(2)
    ]
    x_TH = torch.ones(256, H, dtype=torch.bfloat16, device=device)
    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    summed = torch.zeros(1 << 20, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(4)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    rng = random.Random(rank.rank)
    stop, failures = threading.Event(), list[str]()
    other = threading.Thread(target=capture_graphs, args=(stop, device, failures))
    other.start()
    torch.cuda.synchronize()
    for i in range(rounds):
        # The order is the same on all ranks (NCCL wants it); how far each is ahead is not.
        for stream in streams:
            with torch.cuda.stream(stream):
                if rng.random() < 0.2:
                    torch.cuda._sleep(rng.randrange(200_000))
        with torch.cuda.stream(streams[2]):
            torch.matmul(square, square)
        with torch.cuda.stream(streams[3]):
            dist.all_reduce(summed, group=nccl)
        for buffer, stream in zip(buffers, streams, strict=False):
            with torch.cuda.stream(stream):
                wrong += one_round(i, buffer, x_TH, K)
        if i % 100 == 99:
            for stream in streams:
                stream.synchronize()
            if rng.random() < 0.3:
                torch.cuda.empty_cache()  # as the allocator does when memory is short
    torch.cuda.synchronize()
    stop.set()
    other.join()
    assert not failures, failures
    for buffer in buffers:
        buffer.check()
        buffer.close()
    return int(wrong)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("connections", [1, 32])
def test_skew_beside_nccl_and_a_full_device(connections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(connections))
    monkeypatch.setenv("UCCL_EP_BACKEND", "cuda")
    num_gpus = torch.cuda.device_count()
    num_ranks = num_gpus if devices.lacking(4) else max(4, num_gpus)
    with ProcessRanks(num_ranks, with_everything_around, (ROUNDS,)) as ranks:
        outcomes = ranks.outcomes(timeout_s=500)
    assert all(not outcome.error for outcome in outcomes.values()), outcomes
    assert [outcome.value for outcome in outcomes.values()] == [0] * len(outcomes)


def graph_around(rank: Rank, replays: int) -> Any:
    device = torch.device("cuda", rank.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    config = EpConfig(num_experts=E_ALL, hidden=H, budget_bytes=64 << 20)
    generator = torch.Generator(device).manual_seed(rank.rank)
    with Buffer(None, config, bootstrap=TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S)) as buffer:
        x_TH = torch.ones(256, H, dtype=torch.bfloat16, device=device)
        idx_TK = torch.empty(256, K, dtype=torch.int64, device=device)
        score_TE = torch.empty(256, E_ALL, device=device)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        idx_TK.copy_(torch.arange(256 * K, device=device).reshape(256, K) % E_ALL)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            result = buffer.dispatch(x_TH, idx_TK, capacity=256 * K * rank.num_ranks)
            # As many rows as pairs were sent here come back, each of them 1.
            assert result.overflow is not None
            wrong += buffer.combine(result.rows, result.handle).ne(K).sum() + result.overflow
        for _ in range(replays):
            idx_TK.copy_(score_TE.uniform_(generator=generator).topk(K, dim=1).indices)
            graph.replay()
        torch.cuda.synchronize()
        buffer.check()
    return int(wrong)


def test_a_thousand_replays_with_changing_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCL_EP_BACKEND", "cuda")
    with ProcessRanks(max(4, torch.cuda.device_count()), graph_around, (1000,)) as ranks:
        outcomes = ranks.outcomes(timeout_s=100)
    assert all(outcome.value == 0 for outcome in outcomes.values()), outcomes
