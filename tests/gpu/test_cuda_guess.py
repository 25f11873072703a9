"""A dispatch with a new plan gets memory for about what recent ones needed, before its counts are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases import NO_CAPACITY, Case, EngineSpec, check_case, make_case, with_inputs
from tests.gpu.test_cuda_backend import spec_of
from tests.harness import RankGroup
from tests.machine import needs_gpus
from uccl_ep_train import Buffer, EpConfig, memory_plan

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]


def alike(spec: EngineSpec, seed: int, **changes: Any) -> Case:
    """Of the same form and size, whatever the seed."""
    fixed: dict[str, Any] = {
        "num_tokens": (200, 150), "hidden": 512, "dtype": torch.bfloat16, "form": "topk", "top_k": 2,
        "focus": "spread", "drop_rate": 0.0, "weighted": True, "special": False, "capacity": NO_CAPACITY,
        "layout": "expert_major", "expert_alignment": 1, "dispatch_dtype": "fp8", "grad_dtype": "bf16",
    }  # fmt: skip
    return make_case(seed, spec, **(fixed | changes))


def guesses(group: RankGroup) -> list[tuple[int, int]]:
    """By rank: dispatches that went by a guess, and those of them that got too little."""
    stats = [group.buffer(rank).stats() for rank in range(group.num_ranks)]
    return [(int(s["dispatch.guesses"]), int(s["dispatch.guesses_too_low"])) for s in stats]


@pytest.mark.parametrize("layout", ["expert_major", "compact"])
def test_what_comes_as_guessed_is_placed_at_once(layout: str) -> None:
    spec = spec_of(2, hidden=512)
    with spec.group() as group:
        for seed in range(6):
            check_case(group, alike(spec, seed, layout=layout))
        assert guesses(group) == [(5, 0), (5, 0)]


def test_a_guess_that_is_too_low_costs_time_only() -> None:
    spec = spec_of(2, hidden=512)

    def to_one(case: Case, expert: int) -> Case:
        # Column 1 keeps what it had, or is dropped.
        def change(rank: int, entry: Any) -> Any:
            idx = entry.topk_idx.clone()
            idx[:, 0] = expert
            idx[idx[:, 1] == expert, 1] = -1
            return replace(entry, topk_idx=idx)

        return with_inputs(case, change)

    with spec.group() as group:
        for seed in range(4):
            check_case(group, alike(spec, seed))
        before = guesses(group)
        for seed in range(6):
            # Now more for the one, now for the other.
            check_case(group, to_one(alike(spec, 10 + seed), 0 if seed % 2 else 7))
        after = guesses(group)
        for (_, low_before), (_, low_after) in zip(before, after, strict=True):
            assert low_before == 0 and low_after >= 2, (before, after)
        for seed in range(4):
            check_case(group, alike(spec, 20 + seed))


def test_windows_after_a_guess() -> None:
    least = memory_plan(EpConfig(num_experts=8, hidden=4096, backend="cuda"), 2).least_budget_bytes
    spec = spec_of(2, hidden=4096, settings=(("budget_bytes", least + (1 << 20)),))
    with spec.group() as group:
        for seed in range(4):
            check_case(group, alike(spec, seed, hidden=4096, num_tokens=(500, 420)))
        assert guesses(group) == [(3, 0), (3, 0)]
        assert group.buffer(0).stats()["windows"] > 40


def test_memory_is_little_more_than_the_rows() -> None:
    tokens, experts = 1000, 8

    def step(rank: int, buffer: Buffer) -> None:
        generator = torch.Generator().manual_seed(rank)
        x = torch.ones(tokens, 512, dtype=torch.bfloat16, device=buffer.device)
        for _ in range(5):
            idx = torch.randint(experts, (tokens, 1), generator=generator).to(buffer.device)
            result = buffer.dispatch(x, idx, torch.ones(tokens, 1, device=buffer.device))
            rows = result.rows
            assert len(rows) == int(result.tokens_per_expert.sum()) == result.handle.num_rows
            assert result.row_weights is not None and len(result.row_weights) == len(rows)
            assert rows.untyped_storage().nbytes() <= rows.nbytes * 5 / 4 + 64 * 1024
        pending = buffer.dispatch_async(x, idx)
        assert pending.num_rows == int(pending.tokens_per_expert.sum()) == len(pending.wait().rows)
        torch.cuda.synchronize()

    with spec_of(2, hidden=512).group() as group:
        group.run(step)
        assert guesses(group)[0][0] == 5
