"""What surrounds the bits: windows, bytes on the wire, handles, several buffers, disorder, teardown."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.bits import bit_difference
from tests.cases import (
    LAYOUTS,
    PLAIN,
    Case,
    EngineSpec,
    Expected,
    check_case,
    expect,
    make_case,
    run_case,
    with_inputs,
)
from tests.harness import RankGroup, run_ranks
from uccl_ep_train import Buffer
from uccl_ep_train.errors import ClosedError

FP8: dict[str, Any] = {"dtype": torch.bfloat16, "dispatch_dtype": "fp8", "grad_dtype": "bf16"}
FP32: dict[str, Any] = {"dtype": torch.float32, "dispatch_dtype": "bf16", "grad_dtype": "bf16"}
BUSY: dict[str, Any] = {
    "form": "topk",
    "top_k": 4,
    "focus": "spread",
    "drop_rate": 0.0,
    "weighted": True,
    **PLAIN,
}


def stats_of(group: RankGroup) -> list[dict[str, Any]]:
    return group.run(lambda rank, buffer: buffer.stats())


class TestWindows:
    SMALL = (("chunk_bytes", 4096), ("window_chunks", 2))

    @pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1", "3+1", "interleaved"])
    @pytest.mark.parametrize("wire", [FP8, FP32], ids=["fp8", "fp32"])
    def test_windows_may_be_lapped_many_times_by_one_operation(
        self, layout: str, wire: dict[str, Any]
    ) -> None:
        spec = EngineSpec(domains=LAYOUTS[layout], num_experts=24, settings=self.SMALL)
        case = make_case(1, spec, num_tokens=[300, 200, 0, 260], hidden=256, **BUSY, **wire)
        with spec.group() as group:
            check_case(group, case)
            stats = stats_of(group)
        assert all(entry["memory.window_chunks"] == 2 for entry in stats)
        assert max(entry["ring.rows.laps"] for entry in stats) >= 16
        assert max(entry["ring.pieces.laps"] for entry in stats) >= 16
        if layout != "1x4":
            assert max(entry["ring.return.laps"] for entry in stats) >= 16
            assert sum(entry["credit.waits"] for entry in stats) > 0

    def test_eight_domains_in_a_sixteenth_of_what_one_dispatch_brings(self) -> None:
        num_ranks, experts_per_rank, hidden = 8, 2, 256
        spec = EngineSpec(domains=tuple(range(num_ranks)), num_experts=num_ranks * experts_per_rank)
        with spec.group() as group:
            least = max(group.buffer(rank).memory_plan().least_budget_bytes for rank in range(num_ranks))
        tight = replace(spec, settings=(("budget_bytes", least),))
        tokens = [1200, 0, 1500, 900, 1500, 1100, 1500, 1300]
        case = make_case(3, tight, num_tokens=tokens, hidden=hidden, **(BUSY | {"top_k": 8}), **FP32)
        brought = [0] * num_ranks  # to each rank, by rows of others
        for source, entry in enumerate(case.inputs):
            assert entry.topk_idx is not None
            for rank in range(num_ranks):
                reached = (entry.topk_idx // experts_per_rank == rank).any(1)
                brought[rank] += int(reached.sum()) * hidden * 4 * (source != rank)
        assert min(brought) >= 16 * least, (brought, least)
        with tight.group() as group:
            check_case(group, case)
            stats = stats_of(group)
        assert all(entry["memory.allocated_bytes"] <= least for entry in stats)
        assert all(entry["ring.rows.laps"] >= 16 for rank, entry in enumerate(stats) if tokens[rank] > 0)
        assert all(entry["credit.waits"] > 0 for rank, entry in enumerate(stats) if tokens[rank] > 0)

    def test_a_window_that_holds_the_operation_waits_for_no_credit(self) -> None:
        spec = EngineSpec(num_experts=24, settings=(("chunk_bytes", 65536), ("window_chunks", 16)))
        with spec.group() as group:
            check_case(group, make_case(1, spec, num_tokens=[60] * 4, hidden=256, **BUSY, **FP8))
            stats = stats_of(group)
        assert sum(entry["credit.waits"] for entry in stats) == 0
        assert max(entry["ring.rows.laps"] for entry in stats) < 16

    def test_the_least_budget_works_and_one_byte_less_is_refused_with_its_number(self) -> None:
        from uccl_ep_train.errors import MemoryBudgetError

        spec = EngineSpec(domains=LAYOUTS["3+1"], num_experts=24)
        with spec.group() as group:
            least = max(group.buffer(rank).memory_plan().least_budget_bytes for rank in range(4))
        tight = replace(spec, settings=(("budget_bytes", least),))
        with tight.group() as group:
            check_case(group, make_case(3, tight, **BUSY))
            assert max(entry["memory.allocated_bytes"] for entry in stats_of(group)) <= least
        with pytest.raises(BaseExceptionGroup) as caught:
            replace(spec, settings=(("budget_bytes", least - 1),)).group()
        assert any(
            isinstance(error, MemoryBudgetError) and str(least) in str(error)
            for error in caught.value.exceptions
        )


class TestWire:
    @pytest.mark.parametrize("layout", ["2x2", "4x1", "3x2", "3+1", "interleaved"])
    @pytest.mark.parametrize("wire", [FP8, FP32], ids=["fp8", "fp32"])
    def test_bytes_between_domains_are_the_oracles_count(self, layout: str, wire: dict[str, Any]) -> None:
        spec = EngineSpec(domains=LAYOUTS[layout], num_experts=24)
        case = make_case(
            4, spec, num_tokens=[40, 17, 33, 25, 8, 21][: spec.num_ranks], hidden=256, **BUSY, **wire
        )
        expected = expect(case)
        with spec.group() as group:
            check_case(group, case, expected)
            stats = stats_of(group)
        assert shipped_bytes(stats, spec) == wanted_bytes(expected, spec)
        # Every rank with tokens uses every rail, and something comes back on it.
        for rank, row in enumerate(shipped_bytes(stats, spec)):
            others = [entry for domain, entry in enumerate(row) if domain != domain_of(spec)[rank]]
            assert all(sent > 0 for sent in others)
        # Control: without weights fewer bytes would be due.
        bare = with_inputs(case, lambda rank, entry: replace(entry, topk_weights=None))
        assert wanted_bytes(expect(bare), spec) != wanted_bytes(expected, spec)

    def test_a_row_crosses_once_however_many_ranks_of_the_domain_want_it(self) -> None:
        spec = EngineSpec(domains=(0, 1, 1, 1), num_experts=8, hidden=128)
        everywhere = torch.tensor([[2, 4, 6, 7]]).repeat(10, 1)
        case = make_case(1, spec, num_tokens=[10, 0, 0, 0], hidden=128, **{**BUSY, "weighted": False}, **FP8)
        case = with_inputs(
            case, lambda rank, entry: replace(entry, topk_idx=everywhere) if rank == 0 else entry
        )
        with spec.group() as group:
            check_case(group, case)
            stats = stats_of(group)
        assert stats[0]["rows.shipped"] == 2 * 10  # dispatch, and the gradient of combine
        assert sum(entry["rows.relayed"] for entry in stats) == 2 * 10


def domain_of(spec: EngineSpec) -> list[int]:
    return spec.oracle().domain_of


def shipped_bytes(stats: list[dict[str, Any]], spec: EngineSpec) -> list[list[int]]:
    """[rank][domain]: payload of rows and of returned sums that a rank sent to a domain."""
    num_domains = len(set(spec.domains))
    names = [[f"ship.{ring}.domain{d}.bytes" for ring in ("rows", "return")] for d in range(num_domains)]
    return [[int(sum(entry.get(name, 0) for name in pair)) for pair in names] for entry in stats]


def wanted_bytes(expected: Expected, spec: EngineSpec) -> list[list[int]]:
    owner = domain_of(spec)
    total = (expected.dispatched.wire.bytes + expected.grad_wire.bytes).tolist()
    returned = (expected.combined.wire.bytes + expected.dispatch_backward.wire.bytes).tolist()
    for relay, by_source in enumerate(returned):
        for source, count in enumerate(by_source):
            total[relay][owner[source]] += count
    return total


class TestHandles:
    SPEC = EngineSpec(domains=LAYOUTS["2x2"], num_experts=24)

    def test_a_cached_plan_gives_the_same_rows_without_exchanging_routing(self) -> None:
        case = make_case(5, self.SPEC, num_tokens=[20, 9, 0, 31], **BUSY, **FP8)
        other = make_case(6, self.SPEC, num_tokens=[20, 9, 0, 31], **BUSY, **FP8)
        # The rows and weights of another case on this one's routing.
        mixed = with_inputs(other, lambda rank, entry: replace(entry, topk_idx=case.inputs[rank].topk_idx))
        mixed = replace(mixed, expert_alignment=case.expert_alignment)
        wanted = expect(mixed)

        def step(rank: int, buffer: Buffer) -> list[str]:
            first = case.inputs[rank]
            handle = buffer.dispatch(first.x, first.topk_idx, first.topk_weights,
                                     expert_alignment=case.expert_alignment).handle  # fmt: skip
            # What was produced; "ship." counts what is flushed, which may be later.
            before = {name: value for name, value in buffer.stats().items() if "ring.meta." in name}
            again = mixed.inputs[rank]
            given = {"topk_weights": again.topk_weights, "handle": handle}
            bare = buffer.dispatch(again.x, **given)
            assert before == {name: value for name, value in buffer.stats().items() if "ring.meta." in name}
            # The same routing may be given too: it is checked, not exchanged.
            full = buffer.dispatch(again.x, again.topk_idx, **given)
            assert bare.handle.plan_id == full.handle.plan_id == handle.plan_id
            found = []
            for result in (bare, full):
                out = buffer.combine(wanted.expert_rows[rank], result.handle, bias=wanted.bias[rank])
                assert wanted.dispatched.row_weights is not None
                found += [
                    bit_difference(result.rows, wanted.dispatched.rows[rank]),
                    bit_difference(result.row_weights, wanted.dispatched.row_weights[rank]),
                    bit_difference(out, wanted.combined.outputs[rank]),
                ]
            return [line for line in found if line]

        assert run_ranks(4, self.SPEC.config(), step) == [[]] * 4

    @pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
    def test_several_handles_may_be_in_flight(self, order: str) -> None:
        cases = [make_case(seed, self.SPEC, **PLAIN) for seed in range(20, 25)]
        expected = [expect(case) for case in cases]

        def step(rank: int, buffer: Buffer) -> list[str]:
            pending = []
            for case in cases:
                given = case.inputs[rank]
                pending.append(
                    buffer.dispatch_async(
                        given.x,
                        **given.routing_arguments(given.weights),
                        expert_alignment=case.expert_alignment,
                        dispatch_dtype=case.dispatch_dtype,
                    )
                )
            counts = [entry.tokens_per_expert for entry in pending]
            turns = list(range(len(cases)))
            turns = turns if order.startswith("first") else turns[::-1]
            combines = {
                i: buffer.combine_async(
                    expected[i].expert_rows[rank], pending[i].handle, bias=expected[i].bias[rank]
                )
                for i in turns
            }
            found = []
            for i in reversed(turns):
                out, result = combines[i].wait(), pending[i].wait()
                assert (
                    pending[i].done and combines[i].done and torch.equal(counts[i], result.tokens_per_expert)
                )
                found.append(bit_difference(result.rows, expected[i].dispatched.rows[rank]))
                found.append(bit_difference(out, expected[i].combined.outputs[rank]))
            return [line for line in found if line]

        assert run_ranks(4, self.SPEC.config(), step) == [[]] * 4

    def test_a_handle_is_small_and_outlives_many_operations(self) -> None:
        case = make_case(5, self.SPEC, num_tokens=[40, 30, 20, 10], **BUSY, **FP8)
        expected = expect(case)
        noise = [make_case(seed, self.SPEC) for seed in range(8)]
        unused = [expect(entry) for entry in noise]

        def step(rank: int, buffer: Buffer) -> str:
            given = case.inputs[rank]
            result = buffer.dispatch(given.x, given.topk_idx, given.topk_weights,
                                     expert_alignment=case.expert_alignment)  # fmt: skip
            for entry, wanted in zip(noise, unused, strict=True):
                run_case(entry, wanted, rank, buffer)
            pairs = 4 * len(given.x) + int(sum(result.handle.tokens_per_expert_exact))
            # 16 bytes for each sent or received pair, and what does not grow with them.
            assert result.handle.nbytes <= 16 * pairs + 8192
            out = buffer.combine(expected.expert_rows[rank], result.handle, bias=expected.bias[rank])
            return bit_difference(out, expected.combined.outputs[rank])

        assert run_ranks(4, self.SPEC.config(), step) == [""] * 4


class TestManyBuffers:
    def test_two_buffers_of_the_same_ranks_work_at_the_same_time(self) -> None:
        specs = [
            EngineSpec(domains=LAYOUTS["2x2"], num_experts=8),
            EngineSpec(domains=LAYOUTS["1x4"], num_experts=24),
        ]
        cases = [make_case(seed, spec, num_tokens=[50, 0, 20, 30], **BUSY) for seed, spec in enumerate(specs)]
        expected = [expect(case) for case in cases]

        def step(rank: int, first: Buffer, second: Buffer) -> list[str]:
            pending = []
            for case, buffer in zip(cases, (first, second), strict=True):
                given = case.inputs[rank]
                pending.append(
                    buffer.dispatch_async(
                        given.x, given.topk_idx, given.topk_weights,
                        expert_alignment=case.expert_alignment, dispatch_dtype=case.dispatch_dtype,
                    )
                )  # fmt: skip
            # Waited for in an order that differs between ranks: the buffers do not depend on each other.
            turns = (0, 1) if rank % 2 else (1, 0)
            results = {i: pending[i].wait() for i in turns}
            outs = [
                buffer.combine(expected[i].expert_rows[rank], results[i].handle, bias=expected[i].bias[rank])
                for i, buffer in enumerate((first, second))
            ]
            found = [bit_difference(results[i].rows, expected[i].dispatched.rows[rank]) for i in (0, 1)]
            found += [bit_difference(outs[i], expected[i].combined.outputs[rank]) for i in (0, 1)]
            return [line for line in found if line]

        with specs[0].group() as one, specs[1].group() as two:
            for _ in range(5):
                assert one.run(lambda rank, buffer: step(rank, buffer, two.buffer(rank))) == [[]] * 4

    def test_a_buffer_is_closed_and_made_again_many_times(self) -> None:
        spec = EngineSpec(domains=LAYOUTS["2x2"])
        for seed in range(8):
            with spec.group() as group:
                check_case(group, make_case(seed, spec))

    def test_what_was_allocated_is_what_was_planned(self) -> None:
        for domains in LAYOUTS.values():
            spec = EngineSpec(domains=domains, num_experts=12)
            with spec.group() as group:
                for entry, plan in zip(
                    stats_of(group), group.run(lambda rank, buffer: buffer.memory_plan()), strict=True
                ):
                    assert entry["memory.allocated_bytes"] == plan.total_bytes <= plan.budget_bytes

    def test_a_closed_buffer_says_so_and_keeps_its_counters(self) -> None:
        spec = EngineSpec(domains=LAYOUTS["2x1"])
        case = make_case(1, spec, num_tokens=[4, 4], **BUSY)
        expected = expect(case)

        def step(rank: int, buffer: Buffer) -> None:
            handle = run_case(case, expected, rank, buffer).handle
            buffer.wake()  # nothing to do on the host
            buffer.close()
            buffer.close()
            assert buffer.closed and buffer.stats()["dispatch.calls"] == 2
            with pytest.raises(ClosedError):
                buffer.dispatch(case.inputs[rank].x, case.inputs[rank].topk_idx)
            with pytest.raises(ClosedError):
                buffer.combine(expected.expert_rows[rank], handle)
            with pytest.raises(ClosedError):
                buffer.wake()

        run_ranks(2, spec.config(), step)


class TestDisorder:
    """The loop transport delivers out of order, twice, late, or refuses: no bit changes."""

    FAULTS = (
        ("loop_seed", 7), ("loop_refuse_rate", 0.3), ("loop_duplicate_rate", 0.3), ("loop_latency_us", 50.0),
        ("chunk_bytes", 8192), ("window_chunks", 3),
    )  # fmt: skip

    @pytest.mark.parametrize("layout", ["2x2", "4x1", "3+1", "interleaved"])
    def test_disorder_duplicates_and_refusals_change_no_bit(self, layout: str) -> None:
        spec = EngineSpec(domains=LAYOUTS[layout], num_experts=24, settings=self.FAULTS)
        with spec.group() as group:
            for seed in range(6):
                check_case(group, make_case(seed, spec, max_tokens=150, **BUSY))
            stats = stats_of(group)
        assert sum(entry["proxy.refused_posts"] for entry in stats) > 0
        assert sum(entry["proxy.duplicates_dropped"] for entry in stats) > 0

    def test_a_clean_link_refuses_and_duplicates_nothing(self) -> None:
        spec = EngineSpec(num_experts=24)
        with spec.group() as group:
            check_case(group, make_case(1, spec, max_tokens=150, **BUSY))
            stats = stats_of(group)
        assert sum(entry["proxy.refused_posts"] + entry["proxy.duplicates_dropped"] for entry in stats) == 0

    def test_engines_with_different_disorder_agree_in_every_bit(self) -> None:
        bits = []
        case: Case | None = None
        for seed in (1, 2, 3):
            settings = tuple(dict(self.FAULTS, loop_seed=seed).items())
            spec = EngineSpec(num_experts=24, settings=settings)
            case = make_case(9, spec, num_tokens=[90, 0, 41, 77], special=True, **BUSY, **FP8)
            with spec.group() as group:
                bits.append(check_case(group, case))
        for other in bits[1:]:
            for first, again in zip(bits[0], other, strict=True):
                assert not bit_difference(first.out, again.out) and not bit_difference(first.rows, again.rows)

    def test_a_slow_link_is_slow_and_exact(self) -> None:
        """The rate limit is real: the bytes take at least as long as the link needs for them."""
        gbytes_per_s = 0.002
        spec = EngineSpec(domains=LAYOUTS["2x1"], settings=(("loop_gbytes_per_s", gbytes_per_s),))
        case = make_case(2, spec, num_tokens=[400, 400], hidden=256, **BUSY, **FP8)
        expected = expect(case)
        with spec.group() as group:
            started = time.monotonic()
            check_case(group, case, expected)
            seconds = time.monotonic() - started
        assert seconds >= 0.9 * max(map(sum, wanted_bytes(expected, spec))) / (gbytes_per_s * 1e9)


def test_rows_of_several_widths_and_dtypes_share_a_buffer() -> None:
    spec = EngineSpec(hidden=1024, num_experts=24)
    with spec.group() as group:
        for seed, hidden in enumerate((128, 1024, 256, 384)):
            for wire in (FP8, FP32):
                check_case(group, make_case(seed, spec, hidden=hidden, **wire))
