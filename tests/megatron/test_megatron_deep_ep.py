"""Megatron's own flex dispatcher, with DeepEP as its backend, runs on the module of DeepEP's shape."""

from __future__ import annotations

import pytest

from tests.megatron.harness import MegatronRanks
from tests.megatron.settings import StageCase

EXACT = {"rows", "tokens_per_expert", "row_probs", "probs_grad"}
CASES = {
    "bf16": (StageCase(), 0.02),
    "fp32": (StageCase(dtype="fp32"), 1e-6),
    "unequal and zero tokens": (StageCase(dtype="fp32", tokens=(7, 0, 33, 1)), 1e-6),
    "all tokens to two experts": (StageCase(dtype="fp32", routing="one_expert"), 1e-6),
    "capacity": (StageCase(dtype="fp32", capacity_factor=0.75), 1e-6),
    "ep2": (StageCase(dtype="fp32", ep=2), 1e-6),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_see_the_same_bits_and_sums_are_close(ranks: MegatronRanks, name: str) -> None:
    """Sums are in another order than all-to-all's, so they differ by roundings."""
    case, most = CASES[name]
    for result in ranks.run("stage_case.compare_deep_ep", case=case):
        assert {part: result[part] for part in EXACT} == dict.fromkeys(EXACT, 0.0)
        assert max(result.values()) < most


def test_a_lost_row_is_noticed(ranks: MegatronRanks) -> None:
    """Negative control."""
    results = ranks.run("stage_case.compare_deep_ep", case=StageCase(dtype="fp32", corrupt="zero_row"))
    assert max(result["output"] for result in results) > 0.01
