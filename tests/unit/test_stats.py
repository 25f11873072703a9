"""The memory plan and the statistics as people see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import RankGroup
from tests.machine import needs_kernels
from uccl_ep_train import Buffer, EpConfig, Topology, memory_plan
from uccl_ep_train.core.stats import CALL_KINDS, format_stats, sum_stats
from uccl_ep_train.errors import ConfigError, DtypeError, MemoryBudgetError
from uccl_ep_train.settings.checks import MAX_WINDOW_CHUNKS

BASE: dict[str, Any] = {"num_experts": 8, "hidden": 256, "budget_bytes": 8 << 20}


@pytest.mark.parametrize("domain_size", [1, 2, 4])
def test_the_plan_is_what_an_engine_allocates(domain_size: int) -> None:
    settings = {**BASE, "domain_size": domain_size}

    def allocated(rank: int, buffer: Buffer) -> tuple[float, str]:
        return buffer.stats()["memory.allocated_bytes"], str(buffer.memory_plan())

    with RankGroup(4, settings) as group:
        for rank, (allocated_bytes, text) in enumerate(group.run(allocated)):
            plan = memory_plan(EpConfig(**settings), 4, rank)
            assert plan.total_bytes == allocated_bytes
            assert str(plan) == text


def test_the_total_is_the_sum_of_the_entries_and_within_the_budget() -> None:
    plan = memory_plan(EpConfig(**BASE), Topology.from_domains([0, 1, 0, 1]), rank=3)
    assert plan.total_bytes == sum(size for _, size in plan.entries) <= plan.budget_bytes == 8 << 20
    assert {"staging", "landing"} <= {name for name, _ in plan.entries}
    assert plan["staging"] == dict(plan.entries)["staging"]


@pytest.mark.parametrize("rank", [4, -1, 1.0, "0", True, None])
def test_a_plan_is_that_of_a_rank_of_the_group(rank: object) -> None:
    with pytest.raises(ConfigError, match=r"rank = .*: allowed is 0 .. 3"):
        memory_plan(EpConfig(**BASE), 4, rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", ["4", 4.0, None, [0, 1], True, 10**12])
def test_a_plan_is_for_a_number_of_ranks(ranks: object) -> None:
    with pytest.raises(ConfigError, match=r"num_ranks = .*: allowed is 1 .. 131072"):
        memory_plan(EpConfig(**BASE), ranks)  # type: ignore[arg-type]


def test_a_plan_is_of_a_configuration() -> None:
    with pytest.raises(DtypeError, match="config is dict; allowed is an EpConfig"):
        memory_plan(BASE, 4)  # type: ignore[arg-type]


TOLD: list[dict[str, Any]] = [
    {}, {"window_chunks": 3}, {"chunk_bytes": 65536}, {"chunk_bytes": 9000, "window_chunks": 1},
    {"combine_wire_dtype": "fp32"}, {"max_dtype": "bf16"}, {"low_latency_tokens": 16},
]  # fmt: skip
TOLD_A_GPU: list[dict[str, Any]] = [
    *TOLD, {"window_tokens": 512}, {"num_sms": 2, "stage_sms": 4},
    {"low_latency_tokens": 16, "mask_timeout_s": 5.0},
]  # fmt: skip


def check_least(told: dict[str, Any], domain_size: int, backend: str) -> None:
    """Of the settings as they are."""
    config = EpConfig(**(BASE | {"domain_size": domain_size, "backend": backend} | told))
    least = memory_plan(config, 4).least_budget_bytes
    config = config.replace(budget_bytes=least)
    assert memory_plan(config, 4).total_bytes <= least
    with pytest.raises(MemoryBudgetError, match=str(least)):
        memory_plan(config.replace(budget_bytes=least - 1), 4)


@pytest.mark.parametrize("domain_size", [4, 1])
@pytest.mark.parametrize("told", TOLD, ids=str)
def test_the_least_budget_works_and_less_does_not(told: dict[str, Any], domain_size: int) -> None:
    check_least(told, domain_size, "host")


@needs_kernels
@pytest.mark.parametrize("domain_size", [4, 1])
@pytest.mark.parametrize("told", TOLD_A_GPU, ids=str)
def test_the_least_budget_of_a_gpu_works_and_less_does_not(told: dict[str, Any], domain_size: int) -> None:
    check_least(told, domain_size, "cuda")


def test_a_ring_may_have_as_many_chunks_as_the_setting_says() -> None:
    config = EpConfig(
        num_experts=8, hidden=128, backend="host", domain_size=1, chunk_bytes=4096, budget_bytes=8 << 30
    )
    assert memory_plan(config.replace(window_chunks=MAX_WINDOW_CHUNKS), 4).total_bytes > 2 << 30
    with pytest.raises(ConfigError, match=f"window_chunks = .*allowed is None, or 1 .. {MAX_WINDOW_CHUNKS}"):
        config.replace(window_chunks=MAX_WINDOW_CHUNKS + 1)


def test_64_mib_are_enough_for_64_ranks_and_hidden_8192() -> None:
    config = EpConfig(num_experts=256, hidden=8192, budget_bytes=64 << 20, domain_size=8)
    assert memory_plan(config, 64).total_bytes <= 64 << 20


@needs_kernels
def test_a_plan_of_a_gpu_needs_none_and_grows_with_the_tokens_of_a_window() -> None:
    config = EpConfig(num_experts=256, hidden=7168, max_dtype="bf16", backend="cuda")
    whole = memory_plan(config, 4)
    sized = memory_plan(config.replace(window_tokens=4096), 4)
    small = memory_plan(config.replace(window_tokens=1024), 4)
    row = 2 * 7168
    # Staged rows twice; pieces of tokens that reach all four ranks, and those of a chunk of 32.
    assert sized["rows"] == 2 * 4096 * row
    assert sized["pieces"] == 4 * (4096 + 32) * row
    assert small.total_bytes < sized.total_bytes / 3 and sized.total_bytes < whole.total_bytes
    assert whole.total_bytes <= config.budget_bytes
    # Routing of so many has its place, and rows get what is left.
    few = config.replace(budget_bytes=256 << 20)
    most = memory_plan(few.replace(window_tokens=65536), 4)
    assert most["pieces"] < memory_plan(few, 4)["pieces"] and most.total_bytes <= few.budget_bytes


@needs_kernels
def test_ranks_that_are_alone_in_their_domains_keep_pieces_of_their_own_tokens_only() -> None:
    config = EpConfig(
        num_experts=256, hidden=7168, max_dtype="bf16", backend="cuda", transport="loop", window_tokens=4096,
        budget_bytes=4 << 30,
    )  # fmt: skip
    row = 2 * 7168
    assert memory_plan(config.replace(domain_size=1), 4)["pieces"] == (4096 + 32) * row
    # Of each of two ranks its own stream and one of the other domain.
    assert memory_plan(config.replace(domain_size=2), 4)["pieces"] == 2 * (2 * 4096 + 2 * 32) * row


@needs_kernels
@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, 1), (4, 2), (4, 1), (4, 4)])
def test_a_page_more_than_the_least_budget_holds_the_routing_of_several_windows(
    num_ranks: int, domain_size: int
) -> None:
    """Memory of GPUs comes in pages of 2 MiB, of which an eighth of a small budget is none."""
    config = EpConfig(num_experts=8, hidden=4096, backend="cuda", transport="loop", domain_size=domain_size)
    window = 32  # tokens, the least
    least = memory_plan(config, num_ranks).least_budget_bytes
    plan = memory_plan(config.replace(budget_bytes=least + (2 << 20)), num_ranks)
    assert plan["rows"] == 2 * window * 4 * 4096
    tokens = plan["pair_origin"] // (16 * 4)  # pairs of a token, bytes of a pair
    assert tokens >= 3 * window


@needs_kernels
def test_a_budget_that_does_not_hold_the_routing_of_a_windows_tokens_is_refused_with_one_that_does() -> None:
    """Of 256 ranks in domains of 8 the default budget holds any number of tokens, a quarter does not."""
    config = EpConfig(num_experts=256, hidden=7168, max_dtype="bf16", backend="cuda", domain_size=8)
    plan = memory_plan(config, 64)
    assert plan.max_tokens is not None and plan.max_tokens >= 16384
    assert plan.max_pairs == 32 * 4096 + 8 * (plan.max_tokens - 4096)
    for ranks, tokens in ((64, 4096), (64, 16384), (64, 65536), (256, 65536)):
        plan = memory_plan(config.replace(window_tokens=tokens), ranks)
        assert plan.max_tokens is not None and plan.max_pairs is not None
        assert plan.max_tokens >= tokens and plan.max_pairs >= 8 * tokens
    many, quarter = config.replace(window_tokens=65536), 128 << 20
    least = memory_plan(many, 256).least_budget_bytes
    assert least > quarter > memory_plan(config, 256).least_budget_bytes
    with pytest.raises(MemoryBudgetError, match=f"{quarter}: .* at least {least}"):
        memory_plan(many.replace(budget_bytes=quarter), 256)
    assert memory_plan(many.replace(budget_bytes=least), 256).total_bytes <= least


def test_a_plan_for_a_group_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts = 8"):
        memory_plan(EpConfig(**BASE), 3)


def test_the_text_of_a_plan_names_every_part_the_total_and_the_least_budget() -> None:
    plan = memory_plan(EpConfig(**BASE), 4)
    lines = str(plan).splitlines()
    assert len(lines) == len(plan.entries) + 3
    assert f"{plan.total_bytes:,d} bytes" in str(plan)
    assert lines[-1].startswith("least budget")


STEPS = ("exchange", "plan", "stage", "place", "fold", "merge")


def test_calls_and_seconds_are_counted_by_kind() -> None:
    def run(rank: int, buffer: Buffer) -> dict[str, float]:
        x = torch.ones(4, 256, requires_grad=True)
        for _ in range(3):
            result = buffer.dispatch(x, torch.arange(4)[:, None])
            buffer.combine(result.rows, result.handle).sum().backward()
        buffer.dispatch(x.detach(), torch.arange(4)[:, None])
        return buffer.stats()

    with RankGroup(2, {**BASE, "dispatch_dtype": "bf16"}) as group:
        results = group.run(run)
    for stats in results:
        calls = [stats[f"caller.{kind}.calls"] for kind in CALL_KINDS]
        assert calls == [4, 3, 3, 3]
        # A backward of dispatch is a combine to the engine.
        assert (stats["dispatch.calls"], stats["combine.calls"]) == (4 + 3, 3 + 3)
        assert all(stats[f"caller.{kind}.seconds"] > 0 for kind in CALL_KINDS)
        busy = {step: stats[f"busy_seconds.{step}"] for step in STEPS}
        assert all(seconds > 0 for seconds in busy.values()), busy
        # Headers are exchanged and planned by both.
        assert busy["stage"] + busy["place"] <= stats["dispatch.seconds"]
        assert busy["fold"] + busy["merge"] <= stats["combine.seconds"]
    total = sum_stats(results)
    assert total["caller.dispatch.calls"] == 8
    assert total["memory.allocated_bytes"] == results[0]["memory.allocated_bytes"]


def test_sums_take_the_largest_of_sizes_and_peaks() -> None:
    stats = [
        {"rows.placed": 3.0, "memory.allocated_bytes": 10.0, "proxy.peak_in_flight_bytes": 5.0},
        {"rows.placed": 4.0, "memory.allocated_bytes": 12.0, "proxy.peak_in_flight_bytes": 1.0, "new": 1.0},
    ]
    assert sum_stats(stats) == {
        "rows.placed": 7.0,
        "memory.allocated_bytes": 12.0,
        "proxy.peak_in_flight_bytes": 5.0,
        "new": 1.0,
    }


def test_format_shows_whole_numbers_whole_and_bytes_in_mib_too() -> None:
    text = format_stats({"rows.placed": 123456789.0, "combine.seconds": 0.25, "ship.rows.bytes": 2.0**20})
    assert [line.split(maxsplit=1) for line in text.splitlines()] == [
        ["rows.placed", "123,456,789"],
        ["combine.seconds", "0.25"],
        ["ship.rows.bytes", "1,048,576 (1.000 MiB)"],
    ]
    assert format_stats({}) == ""


def test_a_second_proxy_thread_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"^num_proxies = 2: allowed is 1$"):
        memory_plan(EpConfig(**BASE, backend="host", num_proxies=2), 4)
