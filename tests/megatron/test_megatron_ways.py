"""A recomputation has the plan of its own first run, in whatever order backward passes and steps come."""

from __future__ import annotations

import pytest

from tests.megatron.harness import MegatronRanks

LAYERS = 2
BACKWARD_PASSES = 18  # through each layer, in all ways together
# How often a dispatch is recomputed in a backward pass.
RECOMPUTED = {
    "none": 0,
    "full": 1,
    "selective": 1,
    "torch, reentrant": 1,
    "torch, not reentrant": 1,
    "torch inside of full": 2,
}


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_every_way_to_train_has_the_gradients_of_all_to_all(ranks: MegatronRanks, mode: str) -> None:
    """And no recomputation makes a plan: each has one saved."""
    for found in ranks.run("ways_case.compare", mode=mode, reuse=True):
        assert found["differ"] == found["without gradients"] == []
        assert found["reused"] == LAYERS * BACKWARD_PASSES * RECOMPUTED[mode]


@pytest.mark.parametrize("mode", ["full", "torch, not reentrant"])
def test_recomputations_that_may_not_reuse_plans_make_new_ones(ranks: MegatronRanks, mode: str) -> None:
    for found in ranks.run("ways_case.compare", mode=mode, reuse=False):
        assert found["differ"] == []
        assert found["reused"] == 0


@pytest.mark.parametrize("way", ["last_first", "loss_thrown_away", "called_twice"])
def test_pairing_by_arrival_would_be_noticed(ranks: MegatronRanks, way: str) -> None:
    """Control for the tests above."""
    assert ranks.run("ways_case.paired_by_arrival", way=way) == ["PlanMismatchError"] * ranks.num_ranks


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_a_graph_that_is_dropped_frees_its_plans_at_once(ranks: MegatronRanks, mode: str) -> None:
    losses = 1000 if mode == "full" else 10
    for found in ranks.run("ways_case.thrown_away", mode=mode, losses=losses):
        assert found == {"during": LAYERS, "after": 0}


def test_a_plan_that_something_else_keeps_would_be_noticed(ranks: MegatronRanks) -> None:
    """Control for the test above."""
    for found in ranks.run("ways_case.thrown_away", mode="full", losses=10, keep=True):
        assert found["after"] == 10 * LAYERS
