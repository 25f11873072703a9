"""Several domains on GPUs in the ways a program uses them: graphs, streams, several groups, little memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases import Case, EngineSpec, Expected, Observed, begin_case, differences, expect, make_case
from tests.gpu import test_cuda_backend
from tests.gpu.domain_ranks import NEEDS_GPU, DomainRanks, Seat, as_many_as_fit, spec_of, tight_spec
from tests.gpu.replays import changing_cases, replay, what_comes
from uccl_ep_train import Buffer, EpConfig, memory_plan
from uccl_ep_train.errors import RankMismatchError

pytestmark = NEEDS_GPU


def replay_a_graph(seat: Seat, spec: EngineSpec, tokens: tuple[int, ...]) -> list[str]:
    cases = changing_cases(spec, tokens)
    with seat.buffer(spec.config()) as buffer:
        return replay(seat.rank, buffer, cases, what_comes(cases))


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [("2x1", (60, 41)), ("2x2", (60, 41, 0, 77)), ("4x1", (60, 41, 0, 77))],
)
def test_replays_of_a_graph_follow_the_routing(
    domain_ranks: DomainRanks, layout: str, tokens: tuple[int, ...]
) -> None:
    """The host knows nothing of a replay: chunks, credits and epochs are counted by kernels and proxies."""
    spec = spec_of(layout, hidden=512)
    assert domain_ranks.run(spec.num_ranks, replay_a_graph, spec, tokens) == [[]] * spec.num_ranks


def close_with_a_replay_queued(seat: Seat, domains: tuple[int, ...], abort: bool) -> None:
    config = {"domains": domains, "num_experts": 8, "hidden": 512}
    x = torch.ones(64, 512, dtype=torch.bfloat16, device="cuda")
    experts = torch.arange(64 * 4, device="cuda").reshape(64, 4) % 8
    weights = torch.ones(64, 4, device="cuda")
    buffer, stream, graph = seat.buffer(config), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        got = buffer.dispatch(x, experts, weights, capacity=64 * 4 * seat.num_ranks)
        buffer.combine(got.rows, got.handle)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # half a second
        graph.replay()
    store = dist.distributed_c10d._get_default_store()  # the GPU cannot be asked: it is busy
    queued = [f"job {seat.job}: rank {rank} has queued its replay" for rank in range(seat.num_ranks)]
    store.set(queued[seat.rank], "")
    store.wait(queued)
    buffer.close(abort=abort)
    torch.cuda.synchronize()  # an illegal access would end the context


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("domains", [(0,), (0, 0), (0, 1)])
def test_closing_waits_for_the_replays_of_graphs(
    domain_ranks: DomainRanks, domains: tuple[int, ...], abort: bool
) -> None:
    domain_ranks.run(len(domains), close_with_a_replay_queued, domains, abort)


# ------------------------------------------------------------------------------------- two at a time

Prepared = list[tuple[Case, Expected]]


def prepare(spec: EngineSpec, seeds: range) -> Prepared:
    cases = [make_case(seed, spec, max_tokens=120) for seed in seeds]
    return [(case, expect(case)) for case in cases]


def one_forward_one_backward(seat: Seat, specs: tuple[EngineSpec, EngineSpec], rounds: int) -> list[str]:
    """The forward of a batch on one buffer and stream while another batch's backward is due on the other."""
    found: list[str] = []
    prepared = [prepare(specs[which], range(10 * which, 10 * which + 5)) for which in (0, 1)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    due: tuple[int, Case, Expected, Callable[[], Observed]] | None = None
    with seat.buffer(specs[0].config()) as first, seat.buffer(specs[1].config()) as second:
        for i in range(rounds + 1):
            which, before = i % 2, due
            if i < rounds:
                case, expected = prepared[which][i // 2 % 5]
                with torch.cuda.stream(streams[which]):
                    torch.cuda._sleep((seat.rank + i) % 3 * 500_000)
                    finish = begin_case(case, expected, seat.rank, (first, second)[which])
                due = (which, case, expected, finish)
            if before is not None:
                which, case, expected, finish = before
                with torch.cuda.stream(streams[which]):
                    seen = finish()
                lines = differences(case, expected, seat.rank, seen)
                found += [f"round {i - 1}: {line}" for line in lines]
        assert first.stats()["dispatch.calls"] > 0 and second.stats()["dispatch.calls"] > 0
    return found


@pytest.mark.parametrize(("one", "other"), [("2x1", "2x1"), ("2x2", "interleaved"), ("4x1", "1x4")])
def test_two_buffers_in_flight_on_two_streams(domain_ranks: DomainRanks, one: str, other: str) -> None:
    specs = (spec_of(one, hidden=512), spec_of(other, hidden=512))
    found = domain_ranks.run(specs[0].num_ranks, one_forward_one_backward, specs, 20)
    assert found == [[]] * specs[0].num_ranks


def test_two_groups_of_other_domains_in_one_process() -> None:
    """Ranks are threads: each has a rank of both groups, and operations of both under way."""
    sms = (("num_sms", 8),)
    apart = test_cuda_backend.spec_of(2, domains=(0, 1), hidden=512, settings=sms)
    together = test_cuda_backend.spec_of(2, hidden=512, settings=sms)
    for_one, for_two = prepare(apart, range(8)), prepare(together, range(20, 28))
    with apart.group() as one, together.group() as two:
        assert [group.buffer(0).topology.num_domains for group in (one, two)] == [2, 1]

        def step(rank: int, buffer: Buffer) -> list[str]:
            found = []
            for (first, wanted), (second, also_wanted) in zip(for_one, for_two, strict=True):
                finish_one = begin_case(first, wanted, rank, buffer)
                finish_two = begin_case(second, also_wanted, rank, two.buffer(rank))
                found += differences(second, also_wanted, rank, finish_two())
                found += differences(first, wanted, rank, finish_one())
            return found

        assert one.run(step) == [[], []]


# ------------------------------------------------------------- what a program does while copies are due


def read_back_at_once(seat: Seat, config: dict[str, Any]) -> list[bool]:
    """Calls that keep others of their context waiting until kernels are over, while these wait for copies."""
    with seat.buffer(config) as buffer:
        x_TH = torch.randn(500, config["hidden"], device=buffer.device).to(torch.bfloat16)
        idx_T1 = torch.arange(500, device=buffer.device)[:, None] % config["num_experts"]
        result = buffer.dispatch(x_TH, idx_T1)
        torch.cuda.synchronize()

        def combine() -> torch.Tensor:
            return buffer.combine(result.rows, result.handle)

        same = [combine()[0, 0].item() == x_TH[0, 0].item()]  # a value, from the default stream
        out_TH = combine()
        same.append(bool(torch.erfinv(x_TH.float() * 0).eq(0).all()))  # a kernel's first launch
        same.append(torch.equal(out_TH.cpu(), x_TH.cpu()))
        out_TH = combine()
        torch.cuda.empty_cache()  # frees memory
        same.append(torch.equal(out_TH, x_TH))
        torch.cuda.synchronize()
        buffer.check()
        return same


@pytest.mark.parametrize("layout", ["2x1", "2x2", "4x1"])
def test_a_program_reads_frees_and_loads_while_rows_are_on_their_way(
    domain_ranks: DomainRanks, layout: str
) -> None:
    spec = spec_of(layout, num_experts=8, hidden=2048)
    # Some milliseconds for each operation: its copies are handed over one by one meanwhile.
    slow = {"loop_gbytes_per_s": 0.5, "loop_latency_us": 500.0, "dispatch_dtype": "bf16", "max_dtype": "bf16"}
    found = domain_ranks.run(spec.num_ranks, read_back_at_once, spec.config() | slow)
    assert found == [[True] * 4] * spec.num_ranks


# ------------------------------------------------------------------------------------------- memory


def use_all_of(seat: Seat, config: dict[str, Any]) -> tuple[int, float, int]:
    """Bytes planned, allocated, and the least; after an operation of ones."""
    with seat.buffer(config) as buffer:
        x_TH = torch.ones(60, config["hidden"], dtype=torch.bfloat16, device=buffer.device)
        idx_TK = torch.arange(120, device=buffer.device).reshape(60, 2) % config["num_experts"]
        result = buffer.dispatch(x_TH, idx_TK)
        assert buffer.combine(result.rows, result.handle).eq(2).all()
        torch.cuda.synchronize()
        buffer.check()
        plan = buffer.memory_plan()
        return plan.total_bytes, buffer.stats()["memory.allocated_bytes"], plan.least_budget_bytes


@pytest.mark.parametrize("layout", ["2x1", "2x2", "3+1"])
def test_the_least_budget_works_and_the_plan_is_what_is_allocated(
    domain_ranks: DomainRanks, layout: str
) -> None:
    spec = spec_of(layout, num_experts=16)
    config = EpConfig(**spec.config(), backend="cuda")
    # A rank of a small domain merges for more ranks than others do.
    leasts = [memory_plan(config, spec.num_ranks, rank).least_budget_bytes for rank in range(spec.num_ranks)]
    for budget in (max(leasts), 128 << 20):
        results = domain_ranks.run(
            spec.num_ranks, use_all_of, spec.config() | {"hidden": 1024, "budget_bytes": budget}
        )
        for least, (planned, allocated, told) in zip(leasts, results, strict=True):
            assert planned == allocated <= budget and told == least


def contexts_after_use(seat: Seat, config: dict[str, Any]) -> list[int]:
    """The GPUs on which this process has a context when it has closed a buffer."""
    use_all_of(seat, config)
    driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
    found = []
    for gpu in range(torch.cuda.device_count()):
        assert driver.cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(active)) == 0
        found += [gpu] * active.value
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("domains", [(0, 0), (0, 1)])
def test_a_process_has_a_context_on_its_own_gpu_only(
    domain_ranks: DomainRanks, domains: tuple[int, ...]
) -> None:
    """A thread of its own closes a buffer, and a thread's current GPU is the first one to begin with."""
    spec = EngineSpec(domains=domains, num_experts=16, hidden=1024)
    assert domain_ranks.run(2, contexts_after_use, spec.config()) == [[0], [1]]


def fill_with_a_capacity(seat: Seat, spec: EngineSpec) -> str:
    """All ranks as many tokens, in windows; then one of them fewer: with and without max_tokens."""
    with seat.buffer(spec.config()) as buffer:
        most = as_many_as_fit(buffer)[0]

        def dispatch(tokens: int, max_tokens: int | None = None) -> Any:
            x_TH = torch.ones(tokens, spec.hidden, dtype=torch.bfloat16, device=buffer.device)
            idx_TK = torch.arange(tokens, device=buffer.device).reshape(-1, 1) % spec.num_experts
            return buffer.dispatch(
                x_TH, idx_TK, capacity=2 * most, dispatch_dtype="bf16", pad_to_capacity=True,
                max_tokens=max_tokens,
            )  # fmt: skip

        for result in (dispatch(most), dispatch(most if buffer.rank == 0 else 1, most)):
            assert buffer.combine(result.rows, result.handle).eq(1).all()
            buffer.check()
        assert buffer.stats()["windows"] > 4
        with pytest.raises(RankMismatchError) as caught:
            dispatch(most if buffer.rank == 0 else 1)
            torch.cuda.synchronize()
            buffer.check()
            time.sleep(5)  # the other rank found it
            buffer.check()
        return str(caught.value)


def test_with_a_capacity_ranks_need_as_many_tokens_where_they_go_in_windows(
    domain_ranks: DomainRanks,
) -> None:
    texts = domain_ranks.run(2, fill_with_a_capacity, tight_spec("2x1"))
    assert all("rank 0 has" in text and "with a capacity rank 1 holds" in text for text in texts), texts
