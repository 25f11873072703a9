"""The plug-in is in place or says why not; there is no way to train with another dispatcher unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.harness import MegatronRanks
from tests.megatron.settings import TrainCase

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def same_on_all(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results), results
    return results[0]


def test_enable_serves_all_layers_from_one_buffer_and_disable_undoes_it(ranks: MegatronRanks) -> None:
    found = same_on_all(ranks.run("plugin_case.lifecycle"))
    assert found["verified"] == 3
    assert found["verified chunks"] == 6
    assert found["buffers"] == found["one buffer"] == 1
    assert found["described"]
    assert found["again"] == {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
    }
    assert found["other options"][0] == found["no reuse"][0] == "ConfigError"
    assert found["replaced"] == 7
    assert found["our name"] == ("flex", "hybridep")
    assert found["restored"]
    assert found["our name after"] == "uccl_ep", "Megatron, which does not know it, has to see and refuse it"
    assert found["buffers after"] == 0
    assert found["used after"][0] == "ClosedError"


def test_every_way_to_miss_our_dispatcher_is_an_error(ranks: MegatronRanks) -> None:
    found = same_on_all(ranks.run("plugin_case.refusals"))
    kinds = {name: error for name, (error, _) in found.items()}
    assert kinds == {
        "built before": "DispatcherMissingError",
        "no MoE layer": "DispatcherMissingError",
        "other carrier": "DispatcherMissingError",
        "fp8 rows of fp32": "ConfigError",
        "model's option": "ConfigError",
        "bad option": "ConfigError",
        "unknown option": "ConfigError",
        "reuse": "ConfigError",
    }
    assert "MoEAlltoAllTokenDispatcher" in found["built before"][1]
    assert "MoEAlltoAllTokenDispatcher" in found["other carrier"][1]
    assert "hybridep" in found["other carrier"][1]


def test_an_unknown_megatron_is_refused_and_left_alone(ranks: MegatronRanks) -> None:
    found = same_on_all(ranks.run("plugin_case.unknown_megatron"))
    assert found["arguments"][0] == found["stage"][0] == "UnsupportedMegatronError"
    assert "layer_number" in found["arguments"][1]
    assert "token_combine" in found["stage"][1]
    assert found["unchanged"]


def test_no_step_of_an_optimizer_in_a_graph_follows_a_failed_operation(ranks: MegatronRanks) -> None:
    """Its replays run no hook of torch's. Controls: before the failure, and without the plug-in, it steps."""
    for rank, found in enumerate(ranks.run("plugin_case.replayed_steps")):
        assert found["good"] == (("", ""), 1)
        assert found["failed"][0] and found["failed"][1] == 1, (rank, found)
        assert found["disabled"] == (("", ""), 2)


def test_segments_are_padded_for_products_that_want_it(ranks: MegatronRanks) -> None:
    assert same_on_all(ranks.run("plugin_case.alignments")) == {
        "bf16": 1,
        "fp8": 256,
        "moe_use_grouped_tensor": 256,
    }


def test_a_group_of_one_rank_has_megatrons_own_dispatcher(ranks: MegatronRanks) -> None:
    assert set(same_on_all(ranks.run("plugin_case.alone"))) == {"MoEAlltoAllTokenDispatcher"}


def test_the_overlap_schedule_frees_none_of_our_inputs(ranks: MegatronRanks) -> None:
    """Control in the same call: it frees the inputs of what it takes for all-to-all."""
    found = same_on_all(ranks.run("plugin_case.freed_inputs"))
    assert not found["moe_dispatch, ours"] and not found["mlp, ours"]
    assert found["moe_dispatch, alltoall"] and found["mlp, alltoall"]


def test_a_recomputed_dispatch_exchanges_no_routing(ranks: MegatronRanks) -> None:
    plain = ranks.run("training_case.train", case=TrainCase(steps=2))
    twice = ranks.run("training_case.train", case=TrainCase(steps=2, config=FULL))
    # On a GPU memory is guessed for all new plans but the first, and for no other.
    new_plans = "ring.meta.chunks" if ranks.device == "cpu" else "dispatch.guesses"
    for once, again in zip(plain, twice, strict=True):
        assert again.stats["caller.dispatch.calls"] == 2 * once.stats["caller.dispatch.calls"]
        assert again.stats[new_plans] == once.stats[new_plans] > 0


@pytest.mark.parametrize("on_rank", [0, 3])
def test_recomputed_routing_that_differs_on_one_rank_raises_on_all(
    ranks: MegatronRanks, on_rank: int
) -> None:
    case = {"on_rank": on_rank, "checked": True}
    found = ranks.run("plugin_case.recomputation_with_other_routing", **case)
    assert [error for error, _ in found] == ["PlanMismatchError"] * len(found), found


def test_without_the_saved_plan_other_routing_would_go_unnoticed(ranks: MegatronRanks) -> None:
    """Control for the test above."""
    found = ranks.run("plugin_case.recomputation_with_other_routing", on_rank=0, checked=False)
    assert [error for error, _ in found] == [""] * len(found)
