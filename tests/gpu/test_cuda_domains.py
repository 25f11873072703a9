"""Several domains on GPUs give the oracle's bits, whatever the options, sizes and faults of the network.

So does one domain of four processes, which other tests make of threads with a GPU each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases import NO_CAPACITY, EngineSpec, expect, make_case, with_inputs
from tests.gpu.domain_ranks import NEEDS_GPU, DomainRanks, Seat, check, spec_of, tight_spec, wrong_with
from uccl_ep_train import EpConfig, memory_plan

pytestmark = NEEDS_GPU

SEVERAL = ["2x1", "2x2", "4x1"]
EACH = pytest.mark.parametrize("layout", ["1x4", *SEVERAL])
EACH_WITH_A_NETWORK = pytest.mark.parametrize("layout", SEVERAL)
SOURCE_ORDER = {"1x4": (1, 3, 0, 2), "2x1": (1, 0), "2x2": (2, 0, 3, 1), "4x1": (3, 1, 0, 2)}


@pytest.mark.parametrize("layout", ["1x4", "2x1", "4x1", "2x2", "3+1", "interleaved", "3x2"])
def test_random_cases(domain_ranks: DomainRanks, layout: str) -> None:
    check(domain_ranks, spec_of(layout), range(12), max_tokens=150)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["1x4", "2x1", "4x1", "2x2", "3+1", "interleaved", "3x2"])
def test_many_random_cases(domain_ranks: DomainRanks, layout: str) -> None:
    for first in range(100, 220, 40):
        check(domain_ranks, spec_of(layout), range(first, first + 40), max_tokens=300)


@EACH
@pytest.mark.parametrize("option", ["combine_wire_dtype", "fp8_scale", "source_order"])
def test_options(domain_ranks: DomainRanks, layout: str, option: str) -> None:
    value = SOURCE_ORDER[layout] if option == "source_order" else "fp32"
    settings = (("max_dtype", "fp32"),)
    spec = spec_of(layout, hidden=384, settings=settings, **{option: value})
    wires: dict[str, Any] = (
        {"dispatch_dtype": "fp8", "dtype": torch.bfloat16} if option == "fp8_scale" else {}
    )
    check(domain_ranks, spec, range(4), max_tokens=100, **wires)


@pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1"])
@pytest.mark.parametrize("experts", [8, 64, 256])
@pytest.mark.parametrize("form", ["topk", "map"])
def test_many_experts(domain_ranks: DomainRanks, layout: str, experts: int, form: str) -> None:
    check(domain_ranks, spec_of(layout, num_experts=experts, hidden=512), range(3), form=form, max_tokens=300)


@EACH
@pytest.mark.parametrize("reach", [{"form": "topk", "top_k": 32}, {"form": "map", "density": 1.0}], ids=str)
def test_tokens_with_very_many_experts(domain_ranks: DomainRanks, layout: str, reach: dict[str, Any]) -> None:
    """Every token reaches every rank: streams have all tokens, and returned sums all pieces."""
    spec = spec_of(layout, num_experts=64, hidden=256)
    check(domain_ranks, spec, range(2), max_tokens=120, focus="spread", drop_rate=0.0, **reach)


@EACH_WITH_A_NETWORK
def test_few_experts_of_a_token_leave_streams_empty(domain_ranks: DomainRanks, layout: str) -> None:
    spec = spec_of(layout, hidden=256)
    for focus in ("expert", "rank"):  # only one rank, or one domain, gets anything
        check(domain_ranks, spec, range(2), form="topk", top_k=1, focus=focus, max_tokens=90)


@EACH
def test_the_smallest_rows(domain_ranks: DomainRanks, layout: str) -> None:
    check(domain_ranks, spec_of(layout, hidden=32), range(4), hidden=32, max_tokens=200)


@EACH
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
@pytest.mark.parametrize("hidden", [7168, 2880])
def test_real_sizes(domain_ranks: DomainRanks, layout: str, wire: str, hidden: int) -> None:
    spec = spec_of(layout, num_experts=256, hidden=hidden, settings=(("budget_bytes", 512 << 20),))
    tokens = (300, 73) if layout == "2x1" else (300, 0, 73, 130)
    check(
        domain_ranks, spec, [1], num_tokens=tokens, hidden=hidden, dtype=torch.bfloat16, form="topk", top_k=8,
        dispatch_dtype=wire, focus="spread", drop_rate=0.0, capacity=NO_CAPACITY,
    )  # fmt: skip


ROWS: dict[str, dict[str, Any]] = {
    "compact": {"layout": "compact", "capacity": NO_CAPACITY},
    "compact with a capacity": {"layout": "compact", "capacity": 60},
    "capacity that is enough": {"layout": "expert_major", "capacity": 2000},
    "capacity that overflows": {"layout": "expert_major", "capacity": 20},
    "alignment": {"layout": "expert_major", "expert_alignment": 16, "capacity": NO_CAPACITY},
    "alignment and overflow": {"layout": "expert_major", "expert_alignment": 128, "capacity": 200},
}


@EACH
@pytest.mark.parametrize("rows", ROWS)
def test_layouts_of_rows(domain_ranks: DomainRanks, layout: str, rows: str) -> None:
    spec = spec_of(layout, hidden=512)
    told: dict[str, Any] = {
        "num_tokens": (70, 55) if layout == "2x1" else (70, 0, 55, 90), "form": "topk", "top_k": 3,
        "focus": "spread", "drop_rate": 0.1, "weighted": True, **ROWS[rows],
    }  # fmt: skip
    check(domain_ranks, spec, range(3), **told)
    if "overflow" in rows:  # control: the cases are what they are called
        plans = [expect(make_case(seed, spec, **told)).dispatched.plan for seed in range(3)]
        assert all(any(plan.overflow or ()) for plan in plans)


@EACH
def test_plain_loads_give_the_same_bits(domain_ranks: DomainRanks, layout: str) -> None:
    """What GPUs without bulk copies run."""
    check(domain_ranks, spec_of(layout, settings=(("bulk_copies", False),)), range(5), max_tokens=150)


@EACH_WITH_A_NETWORK
@pytest.mark.parametrize("bulk_copies", [True, False])
def test_one_block_beside_that_of_the_network(
    domain_ranks: DomainRanks, layout: str, bulk_copies: bool
) -> None:
    """The fewest SMs of several domains: a single block stages, places, folds and merges."""
    spec = spec_of(layout, hidden=512, settings=(("num_sms", 2), ("bulk_copies", bulk_copies)))
    check(domain_ranks, spec, range(3), form="topk", top_k=4, focus="spread", drop_rate=0.0, max_tokens=400)


WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16, "dispatch_dtype": "bf16"},
    "fp8": {"dtype": torch.bfloat16, "dispatch_dtype": "fp8", "grad_dtype": "bf16"},
}
BUSY: dict[str, Any] = {
    "hidden": 4096, "top_k": 4, "density": 0.6, "focus": "spread", "drop_rate": 0.0, "capacity": NO_CAPACITY,
}  # fmt: skip


@EACH
@pytest.mark.parametrize("wire", WIRES)
def test_more_than_the_buffer_holds_goes_in_windows(
    domain_ranks: DomainRanks, layout: str, wire: str
) -> None:
    """A window ships, lands, folds and returns what the rings hold; the next waits until they are free."""
    stats = check(domain_ranks, tight_spec(layout), range(3), filled=True, **BUSY, **WIRES[wire])
    for entry in stats:
        # A dispatch, a combine and a backward of each per case; rows of codes are half as wide.
        operations = 4 * entry["caller.dispatch.calls"]
        assert entry["windows"] >= (1.5 if wire == "fp8" else 2) * operations > 0, entry


@pytest.mark.parametrize("layout", ["2x1", "2x2"])
def test_gradients_of_many_weights_go_in_windows_of_their_own(domain_ranks: DomainRanks, layout: str) -> None:
    """A window has those of at most 32,768 pairs of a stream. Control: no weights, fewer windows."""
    tokens = 12_288
    spec = spec_of(layout, num_experts=16, hidden=256, settings=(("window_tokens", tokens),))
    config = EpConfig(**spec.config(), backend="cuda")
    least = memory_plan(config, spec.num_ranks).least_budget_bytes
    spec = replace(spec, settings=(*spec.settings, ("budget_bytes", least)))
    many: dict[str, Any] = {
        "form": "topk", "top_k": 8, "focus": "spread", "drop_rate": 0.0, "capacity": NO_CAPACITY,
        "dtype": torch.bfloat16, "dispatch_dtype": "bf16", "grad_dtype": "bf16",
        "num_tokens": (tokens,) * spec.num_ranks,
    }  # fmt: skip
    with_weights, without = (
        check(domain_ranks, spec, range(1), weighted=weighted, **many) for weighted in (True, False)
    )
    for entry, control in zip(with_weights, without, strict=True):
        assert entry["windows"] >= control["windows"] + 2 > 2, (entry, control)


@EACH
@pytest.mark.parametrize(("tokens", "least", "most"), [(192, 1, 1), (700, 4, 6)])
def test_a_buffer_for_so_many_tokens_takes_them_in_one_window(
    domain_ranks: DomainRanks, layout: str, tokens: int, least: int, most: int
) -> None:
    """A combine of several windows holds two at a time, so each is half as long."""
    spec = spec_of(layout, settings=(("window_tokens", 192), ("max_dtype", "fp32")))
    everybody = {**BUSY, "hidden": 1024, "dtype": torch.float32, "num_tokens": (tokens,) * spec.num_ranks}
    for entry in check(domain_ranks, spec, range(2), **everybody):
        operations = 4 * entry["caller.dispatch.calls"]
        assert 0 < least * operations <= entry["windows"] <= most * operations, entry


@EACH_WITH_A_NETWORK
@pytest.mark.parametrize("wire", WIRES)
def test_a_routing_that_is_longer_than_its_slot_goes_by_chunks(
    domain_ranks: DomainRanks, layout: str, wire: str
) -> None:
    """All tokens have 32 experts of one rank, with weights: other domains send the most that is possible."""
    spec = spec_of(layout, num_experts=256, hidden=256)
    uneven: dict[str, Any] = {
        "form": "topk", "top_k": 32, "focus": "rank", "drop_rate": 0.0, "weighted": True,
    }  # fmt: skip
    case = {"num_tokens": (4096,) * spec.num_ranks, "hidden": 256, **uneven, **WIRES[wire]}
    stats = check(domain_ranks, spec, range(1), **case)
    assert sum(value for entry in stats for key, value in entry.items() if "ship.tail" in key) > 0


FAULTS: dict[str, dict[str, Any]] = {
    "disorder": {"loop_seed": 6, "loop_latency_us": 300.0},
    "duplicates": {"loop_seed": 5, "loop_duplicate_rate": 1.0},
    "refusals": {"loop_seed": 4, "loop_refuse_rate": 0.95},
    "everything": {
        "loop_seed": 7, "loop_duplicate_rate": 0.5, "loop_refuse_rate": 0.5, "loop_latency_us": 100.0,
    },
}  # fmt: skip


@EACH_WITH_A_NETWORK
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_network_may_do_changes_no_bit(domain_ranks: DomainRanks, layout: str, fault: str) -> None:
    """Streams of many small chunks, which come in any order."""
    spec = tight_spec(layout, **FAULTS[fault])
    stats = check(domain_ranks, spec, range(3), filled=True, **BUSY)
    if "loop_refuse_rate" in FAULTS[fault]:
        assert sum(entry["proxy.refused_posts"] for entry in stats) > 0
    if "loop_duplicate_rate" in FAULTS[fault]:
        assert sum(entry["proxy.duplicates_dropped"] for entry in stats) > 0


def test_a_clean_network_neither_refuses_nor_repeats(domain_ranks: DomainRanks) -> None:
    """Control of the counters."""
    stats = check(domain_ranks, spec_of("2x1"), range(2))
    assert all(entry["proxy.refused_posts"] + entry["proxy.duplicates_dropped"] == 0 for entry in stats)
    assert all(entry["proxy.arrivals"] > 0 for entry in stats)


def run_with_a_flipped_bit(seat: Seat, spec: EngineSpec) -> list[str]:
    case = make_case(3, spec, num_tokens=(9,) * spec.num_ranks, hidden=256, dtype=torch.bfloat16,
                     dispatch_dtype="bf16", drop_rate=0.0, special=False, form="topk", top_k=2,
                     capacity=NO_CAPACITY)  # fmt: skip

    def flip(rank: int, entry: Any) -> Any:
        x = entry.x.clone()
        if rank == 1:
            x.view(torch.int16)[4, 5] ^= 1
        return replace(entry, x=x)

    with seat.buffer(spec.config()) as buffer:
        return wrong_with(case, seat, buffer, with_inputs(case, flip))


def test_one_wrong_bit_is_found(domain_ranks: DomainRanks) -> None:
    """Control: whoever got the row sees it, and nobody else."""
    spec = spec_of("2x2")
    found = domain_ranks.run(4, run_with_a_flipped_bit, spec)
    assert 1 <= sum(map(bool, found)) <= 2, found
    assert all(", rows: 1 of " in lines[0] or ", rows: 2 of " in lines[0] for lines in found if lines), found
