"""1,000 random cases: whatever is dispatched and combined, every rank gets the oracle's bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import LAYOUTS, NO_CAPACITY, EngineSpec, check_case, differences, expect, make_case, run_case
from tests.harness import RankGroup

EXAMPLES = 100
SMALL_WINDOWS = (("chunk_bytes", 4096), ("window_chunks", 2))
ROUGH_LINK = (("loop_seed", 3), ("loop_refuse_rate", 0.2), ("loop_duplicate_rate", 0.2), ("window_chunks", 3))

# One engine each, re-used by all of its cases.
SPECS = {
    "1x4": EngineSpec(domains=LAYOUTS["1x4"], num_experts=16, hidden=384),
    "1x4, small windows": EngineSpec(domains=LAYOUTS["1x4"], num_experts=8, settings=SMALL_WINDOWS),
    "2x2": EngineSpec(domains=LAYOUTS["2x2"], num_experts=8, hidden=384, fp8_scale="fp32"),
    "2x2, small windows": EngineSpec(domains=LAYOUTS["2x2"], num_experts=12, settings=SMALL_WINDOWS),
    "2x2, rough link": EngineSpec(num_experts=8, source_order=(2, 0, 3, 1), settings=ROUGH_LINK),
    "4x1": EngineSpec(domains=LAYOUTS["4x1"], num_experts=8, combine_wire_dtype="fp32"),
    "2x1": EngineSpec(domains=LAYOUTS["2x1"], num_experts=64, hidden=1024),
    "3x2": EngineSpec(domains=LAYOUTS["3x2"], num_experts=6, hidden=128, settings=ROUGH_LINK),
    "3+1": EngineSpec(domains=LAYOUTS["3+1"], num_experts=12, settings=SMALL_WINDOWS),
    "interleaved": EngineSpec(domains=LAYOUTS["interleaved"], num_experts=8, source_order=(0, 2, 1, 3)),
}


@pytest.fixture(scope="module", params=SPECS)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[EngineSpec, RankGroup]]:
    spec = SPECS[request.param]
    with spec.group() as group:
        yield spec, group


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """What `make_case` is told; values come from its seed. Simple choices come first, to shrink towards."""
    topk = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    wires = ["bf16", "fp8"] if dtype == torch.bfloat16 else ["bf16"]
    return {
        "seed": draw(st.integers(0, 1 << 20)),
        "dtype": dtype,
        "dispatch_dtype": draw(st.sampled_from(wires)),
        "grad_dtype": draw(st.sampled_from(wires)),
        "form": "topk" if topk else "map",
        "top_k": draw(st.integers(1, 8)) if topk else None,
        "focus": draw(st.sampled_from(["spread", "expert", "rank"])),
        "drop_rate": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) if topk else None,
        "density": None if topk else draw(st.sampled_from([0.2, 0.05, 0.6, 1.0])),
        "weighted": draw(st.booleans()),
        "special": draw(st.booleans()),
        "expert_alignment": draw(st.sampled_from([1, 4, 16, 128])),
        "layout": draw(st.sampled_from(["expert_major", "compact"])),
        "capacity": draw(st.sampled_from([NO_CAPACITY, NO_CAPACITY, 200, 20, 0])),
        "num_tokens": draw(st.lists(st.integers(0, 24), min_size=6, max_size=6)),
    }


def test_the_specs_and_examples_add_up_to_a_thousand() -> None:
    assert len(SPECS) * EXAMPLES >= 1000


# The engine outlives the examples on purpose: they are a sequence of operations on one buffer.
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(told=choices())
def test_any_case_gives_the_oracles_bits(engine: tuple[EngineSpec, RankGroup], told: dict[str, Any]) -> None:
    spec, group = engine
    arguments = dict(told)
    arguments["num_tokens"] = arguments["num_tokens"][: spec.num_ranks]
    check_case(group, make_case(arguments.pop("seed"), spec, **arguments))


def test_random_cases_tell_another_order_of_sums_apart() -> None:
    """Control: an oracle for other domains rounds at other places, and one case in a few shows it."""
    spec = SPECS["2x2"]
    told_apart = 0
    with spec.group() as group:
        for seed in range(10):
            case = make_case(
                seed, spec, num_tokens=[20] * 4, dtype=torch.bfloat16, form="topk", top_k=8, drop_rate=0.0,
                focus="spread", special=False,
            )  # fmt: skip
            fed = expect(case)
            wrong = expect(replace(case, spec=replace(spec, domains=LAYOUTS["1x4"])))
            observed = group.run(lambda rank, buffer, case=case, fed=fed: run_case(case, fed, rank, buffer))
            told_apart += any(differences(case, wrong, rank, seen) for rank, seen in enumerate(observed))
    assert told_apart >= 5
