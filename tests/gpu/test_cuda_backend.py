"""The CUDA backend gives the oracle's bits. Ranks are threads, a GPU each."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.cases import NO_CAPACITY, EngineSpec, check_case, expect, make_case, with_inputs
from tests.gpu.replays import changing_cases, replay, what_comes
from tests.harness import Outcome
from tests.machine import needs_gpus
from uccl_ep_train import Buffer, EpConfig, memory_plan
from uccl_ep_train.errors import (
    CommunicationError,
    DeviceError,
    InputError,
    PeerFailed,
    PlanMismatchError,
    RankMismatchError,
    RoutingError,
    ShapeError,
)

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]

SETTINGS: tuple[tuple[str, Any], ...] = (
    ("backend", "cuda"), ("budget_bytes", 64 << 20), ("arrival_timeout_s", 8.0), ("progress_timeout_s", 4.0),
)  # fmt: skip


def spec_of(num_ranks: int, **changes: Any) -> EngineSpec:
    # Ranks that share a GPU wait for what each other's hosts do to it.
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"{num_ranks} ranks need as many GPUs, there are {torch.cuda.device_count()}")
    settings = SETTINGS + tuple(changes.pop("settings", ()))
    return EngineSpec(**{"domains": (0,) * num_ranks, "settings": settings, **changes})


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_random_cases(num_ranks: int) -> None:
    spec = spec_of(num_ranks, hidden=1024)
    with spec.group() as group:
        for seed in range(60):
            check_case(group, make_case(seed, spec, max_tokens=200))


@pytest.mark.parametrize("experts", [4, 64, 256])
@pytest.mark.parametrize("form", ["topk", "map"])
def test_many_experts(experts: int, form: str) -> None:
    spec = spec_of(4, num_experts=experts, hidden=512)
    with spec.group() as group:
        for seed in range(10):
            check_case(group, make_case(seed, spec, form=form, max_tokens=300))


@pytest.mark.parametrize(
    "options", [{"combine_wire_dtype": "fp32"}, {"fp8_scale": "fp32"}, {"source_order": (2, 0, 3, 1)}]
)
def test_options(options: dict[str, Any]) -> None:
    spec = spec_of(4, hidden=384, **options)
    with spec.group() as group:
        for seed in range(20):
            check_case(group, make_case(seed, spec, max_tokens=100))


@pytest.mark.parametrize("top_k", [1, 31, 32])
def test_few_and_many_experts_of_a_token(top_k: int) -> None:
    spec = spec_of(2, num_experts=64, hidden=256)
    with spec.group() as group:
        for seed in range(5):
            check_case(group, make_case(seed, spec, form="topk", top_k=top_k, max_tokens=120))


def test_real_sizes() -> None:
    spec = spec_of(4, num_experts=256, hidden=7168, settings=(("budget_bytes", 512 << 20),))
    with spec.group() as group:
        for seed, wire in enumerate(["fp8", "bf16"]):
            case = make_case(
                seed, spec, num_tokens=(700, 0, 123, 512), hidden=7168, dtype=torch.bfloat16, form="topk",
                dispatch_dtype=wire, top_k=8, focus="spread", drop_rate=0.0,
            )  # fmt: skip
            check_case(group, case)


def test_plain_loads_give_the_same_bits() -> None:
    """What GPUs without bulk copies run."""
    spec = spec_of(4, hidden=1024, settings=(("bulk_copies", False),))
    with spec.group() as group:
        for seed in range(20):
            check_case(group, make_case(seed, spec, max_tokens=150))


@pytest.mark.parametrize("bulk_copies", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_few_warps_share_out_many_rows(num_ranks: int, bulk_copies: bool) -> None:
    """Beyond what is dealt out to them: where every warp has few rows all of them are."""
    spec = spec_of(num_ranks, hidden=512, settings=(("num_sms", 2), ("bulk_copies", bulk_copies)))
    with spec.group() as group:
        for seed in range(10):
            case = make_case(seed, spec, form="topk", top_k=4, focus="spread", drop_rate=0.0, max_tokens=400)
            check_case(group, case)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_more_than_the_buffer_holds_goes_in_windows(num_ranks: int) -> None:
    least = memory_plan(EpConfig(num_experts=8, hidden=4096, backend="cuda"), num_ranks).least_budget_bytes
    spec = spec_of(num_ranks, hidden=4096, settings=(("budget_bytes", least + (1 << 20)),))
    with spec.group() as group:
        for seed in range(12):
            case = make_case(
                seed, spec, hidden=4096, max_tokens=500, top_k=4, density=0.6, capacity=NO_CAPACITY
            )
            check_case(group, case)
        operations, windows = (
            sum(group.buffer(rank).stats()[name] for rank in range(num_ranks))
            for name in ("caller.dispatch.calls", "windows")
        )
    # A dispatch, a combine and a backward of each per case.
    assert windows > 4 * operations + 20, (windows, operations)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_as_much_routing_as_the_plan_holds_has_the_bits_and_more_is_refused(num_ranks: int) -> None:
    """Of the last 64 tokens there is memory for 8 experts each."""
    tokens, experts = 4160, 64
    sized: dict[str, Any] = {
        "num_experts": experts,
        "hidden": 256,
        "backend": "cuda",
        "window_tokens": tokens,
    }
    plan = memory_plan(EpConfig(**sized, budget_bytes=1 << 30), num_ranks)
    settings = (("budget_bytes", plan.least_budget_bytes), ("window_tokens", tokens))
    spec = spec_of(num_ranks, num_experts=experts, hidden=256, settings=settings)

    def more(rank: int, buffer: Buffer) -> None:
        held = buffer.memory_plan()
        assert (held.max_tokens, held.max_pairs) == (tokens, 32 * 4096 + 8 * 64)
        for num, width, words in (
            (tokens + 1, 1, f"holds the routing of {tokens}; window_tokens = {tokens + 1} needs"),
            (tokens, 32, "holds the routing of 131584 experts of tokens"),
        ):
            idx = torch.arange(width, device=buffer.device).repeat(num, 1)
            with pytest.raises(ShapeError, match=words):
                buffer.dispatch(torch.ones(num, 256, dtype=torch.bfloat16, device=buffer.device), idx)

    with spec.group() as group:
        case = make_case(
            1, spec, form="topk", top_k=31, drop_rate=0.0, num_tokens=(tokens,) * num_ranks,
            capacity=NO_CAPACITY,
        )  # fmt: skip
        check_case(group, case)
        group.run(more)
        check_case(group, case)


@pytest.mark.parametrize("capacity", [3000, 300])
def test_with_a_capacity_more_than_the_buffer_holds_goes_in_windows(capacity: int) -> None:
    least = memory_plan(EpConfig(num_experts=8, hidden=4096, backend="cuda"), 2).least_budget_bytes
    spec = spec_of(2, hidden=4096, settings=(("budget_bytes", least + (1 << 20)),))
    with spec.group() as group:
        for seed in range(6):
            case = make_case(
                seed, spec, hidden=4096, num_tokens=(500, 490), top_k=4, density=0.6, capacity=capacity
            )
            check_case(group, case)
        stats = group.buffer(0).stats()
    assert stats["windows"] > 4 * stats["caller.dispatch.calls"] + 20, stats


def test_replays_of_a_graph_follow_the_routing() -> None:
    spec = spec_of(2, hidden=512)
    cases = changing_cases(spec, (60, 41))
    wanted = what_comes(cases)
    with spec.group() as group:
        found = group.run(lambda rank, buffer: replay(rank, buffer, cases, wanted))
    assert found == [[], []]


def test_counts_cannot_be_read_while_a_graph_is_captured() -> None:
    def step(rank: int, buffer: Buffer) -> None:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
        with pytest.raises(InputError, match="needs a capacity"), capture:
            call(rank, buffer)
        call(rank, buffer)

    with spec_of(1).group() as group:
        group.run(step)


def test_operations_aside_run_beside_the_callers_stream() -> None:
    spec = spec_of(2, hidden=512)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            device = buffer.device
            x = torch.ones(40, 256, dtype=torch.bfloat16, device=device)
            idx = torch.arange(80, device=device).reshape(40, 2) % 8
            handle = buffer.dispatch(x, idx).handle
            torch.cuda.synchronize()
            for i in range(20):
                y = x * i
                pending = buffer.dispatch_async(y, handle=handle, dispatch_dtype="bf16")
                torch.cuda._sleep(200_000)
                rows = pending.wait().rows
                out = buffer.combine_async(rows + 1, handle).wait()
                torch.cuda.synchronize()
                buffer.check()
                assert rows.eq(i).all() and out.eq(2 * (i + 1)).all()

        group.run(step)


def test_a_plan_used_with_another_routing_is_an_error_on_every_rank() -> None:
    def step(rank: int, buffer: Buffer) -> None:
        device = buffer.device
        x = torch.ones(40, 256, dtype=torch.bfloat16, device=device)
        idx = torch.arange(80, device=device).reshape(40, 2) % 8
        handle = buffer.dispatch(x, idx).handle
        buffer.dispatch(x, idx, handle=handle)
        torch.cuda.synchronize()
        buffer.check()
        if rank == 1:
            idx[11] = idx[11].flip(0)
        call(rank, buffer, x=x, topk_idx=idx, topk_weights=None, handle=handle)
        time.sleep(1)
        buffer.check()

    with spec_of(4).group() as group:
        errors = errors_of(group.outcomes(step))
    assert all(isinstance(error, PlanMismatchError) for error in errors), errors


def test_one_wrong_bit_is_found() -> None:
    """Control: the comparison sees it."""
    spec = spec_of(2)
    with spec.group() as group:
        case = make_case(3, spec, num_tokens=(9, 9), dispatch_dtype="bf16", drop_rate=0.0, special=False)
        wanted = expect(case)

        def flip(rank: int, entry: Any) -> Any:
            if rank == 1:
                entry.x.view(torch.int16 if entry.x.dtype == torch.bfloat16 else torch.int32)[4, 5] ^= 1
            return entry

        with pytest.raises(AssertionError, match="rows: "):
            check_case(group, with_inputs(case, flip), wanted)


def errors_of(outcomes: list[Outcome]) -> list[BaseException]:
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    return [outcome.error for outcome in outcomes if outcome.error is not None]


def call(rank: int, buffer: Buffer, **changes: Any) -> None:
    device = buffer.device
    arguments = {
        "x": torch.ones(40, 256, dtype=torch.bfloat16, device=device),
        "topk_idx": torch.arange(80, device=device).reshape(40, 2) % 8,
        "topk_weights": torch.ones(40, 2, device=device),
    }
    result = buffer.dispatch(**(arguments | changes))
    torch.cuda.synchronize()
    buffer.check()
    assert result.rows.eq(1).all()


@pytest.mark.parametrize("what", ["range", "twice"])
def test_experts_that_cannot_be_are_an_error_on_every_rank(what: str) -> None:
    spec = spec_of(4)

    def step(rank: int, buffer: Buffer) -> None:
        idx = torch.arange(80, device=buffer.device).reshape(40, 2) % 8
        if rank == 2:
            idx[7, 1] = 8 if what == "range" else idx[7, 0]
        call(rank, buffer, topk_idx=idx)

    with spec.group() as group:
        errors = errors_of(group.outcomes(step))
    assert all("rank 2: topk_idx names expert" in str(error) and "token 7" in str(error) for error in errors)
    assert [type(error) for error in errors] == [PeerFailed, PeerFailed, RoutingError, PeerFailed]


@pytest.mark.parametrize(
    ("differs", "alike", "texts"),
    [
        ({"dispatch_dtype": "fp8"}, {"dispatch_dtype": "bf16"}, ["bf16 as fp8", "bf16 as bf16"]),
        ({"capacity": 200}, {}, ["a capacity"]),
    ],
)
def test_ranks_that_call_differently_learn_it(
    differs: dict[str, Any], alike: dict[str, Any], texts: list[str]
) -> None:
    spec = spec_of(2)

    def step(rank: int, buffer: Buffer) -> None:
        call(rank, buffer, **(differs if rank == 1 else alike))

    with spec.group() as group:
        errors = errors_of(group.outcomes(step))
    assert all(isinstance(error, RankMismatchError) for error in errors), errors
    assert any(all(text in str(error) for text in texts) for error in errors)


def test_a_rank_that_does_not_come_is_named_and_outputs_are_nan() -> None:
    spec = spec_of(4, settings=(("arrival_timeout_s", 1.0),))

    def step(rank: int, buffer: Buffer) -> Any:
        call(rank, buffer)
        if rank == 3:
            return None
        call(rank, buffer)

    with spec.group() as group:
        outcomes = group.outcomes(step)
    for outcome in outcomes[:3]:
        assert isinstance(outcome.error, CommunicationError) and outcome.error.peer == 3, outcome
        assert outcome.seconds < 4


def test_the_memory_plan_is_what_is_allocated() -> None:
    def step(rank: int, buffer: Buffer) -> None:
        plan = buffer.memory_plan()
        assert plan.total_bytes == buffer.stats()["memory.allocated_bytes"] <= plan.budget_bytes
        assert plan.least_budget_bytes < plan.budget_bytes and plan["rows"] > 0

    with spec_of(2).group() as group:
        group.run(step)
    least = memory_plan(EpConfig(num_experts=8, hidden=256, backend="cuda"), 2).least_budget_bytes
    with spec_of(2, settings=(("budget_bytes", least),)).group() as group:
        group.run(lambda rank, buffer: call(rank, buffer))
    with pytest.raises(ExceptionGroup) as caught, spec_of(2, settings=(("budget_bytes", least - 1),)).group():
        pass
    assert any(str(least) in str(error) for error in caught.value.exceptions)


def test_buffers_together_leave_sms_for_others() -> None:
    all_sms = torch.cuda.get_device_properties(0).multi_processor_count
    with spec_of(1, settings=(("num_sms", all_sms - 40),)).group() as group:
        group.run(lambda rank, buffer: call(rank, buffer))
        with pytest.raises(ExceptionGroup) as caught, spec_of(1).group():
            pass
        assert "32 stay free" in str(caught.value.exceptions[0])
    with spec_of(1).group(), spec_of(1).group() as group:  # given back
        group.run(lambda rank, buffer: call(rank, buffer))
    for settings in ((("num_sms", all_sms - 31),), (("stage_sms", all_sms - 31),)):
        with pytest.raises(ExceptionGroup, match="1 rank"), spec_of(1, settings=settings).group():
            pass


def test_tensors_elsewhere_are_refused_and_the_buffer_stays_usable() -> None:
    spec = spec_of(2)

    def step(rank: int, buffer: Buffer) -> None:
        with pytest.raises(DeviceError, match=r"x is on cpu; allowed is cuda:\d"):
            call(rank, buffer, x=torch.ones(40, 256, dtype=torch.bfloat16))
        with pytest.raises(InputError):
            call(rank, buffer, x=torch.ones(40, 512, dtype=torch.bfloat16, device=buffer.device)[:, ::2])
        odd = torch.ones(40 * 256 + 1, dtype=torch.bfloat16, device=buffer.device)[1:].view(40, 256)
        with pytest.raises(InputError, match="a multiple of 16"):
            call(rank, buffer, x=odd)
        call(rank, buffer)

    with spec.group() as group:
        group.run(step)
