"""Several domains on GPUs give the oracle's bits. Ranks are processes, which may share a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases import LAYOUTS, NO_CAPACITY, EngineSpec, differences, expect, make_case, run_case
from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig, cuda, memory_plan
from uccl_ep_train.bootstrap import TorchBootstrap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not cuda.built(), reason="no GPU, or built without nvcc"
    ),
]

# Ranks that share a GPU take turns on it.
SETTINGS: dict[str, Any] = {
    "backend": "cuda", "budget_bytes": 64 << 20, "arrival_timeout_s": 40.0, "progress_timeout_s": 20.0,
    "num_sms": 8,
}  # fmt: skip


def make_buffer(rank: Rank, config: dict[str, Any]) -> Buffer:
    torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    bootstrap = TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S)
    return Buffer(None, EpConfig(**{**SETTINGS, **config}), bootstrap=bootstrap)


def run_cases(rank: Rank, spec: EngineSpec, seeds: range, options: dict[str, Any]) -> dict[str, float]:
    """Every rank makes all of each case and looks at its own part."""
    with make_buffer(rank, spec.config()) as buffer:
        for seed in seeds:
            case = make_case(seed, spec, **options)
            expected = expect(case)
            found = differences(case, expected, rank.rank, run_case(case, expected, rank.rank, buffer))
            assert not found, "\n".join([repr(case), *found])
        return buffer.stats()


def check(spec: EngineSpec, seeds: range, **options: Any) -> list[dict[str, float]]:
    with ProcessRanks(spec.num_ranks, run_cases, (spec, seeds, options)) as ranks:
        outcomes = ranks.outcomes(timeout_s=55)
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
    return [outcomes[rank].value for rank in range(spec.num_ranks)]


@pytest.mark.parametrize("layout", ["2x1", "4x1", "2x2", "3+1", "interleaved", "3x2"])
def test_random_cases(layout: str) -> None:
    spec = EngineSpec(domains=LAYOUTS[layout], num_experts=12 if layout == "3x2" else 8, hidden=1024)
    check(spec, range(12), max_tokens=150)
