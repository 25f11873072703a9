"""A TransformerConfig may change between steps, serve several models, and say what we cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.harness import MegatronRanks


def same_on_all(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results), results
    return results[0]


def test_padding_of_experts_may_change_after_a_model_is_built(ranks: MegatronRanks) -> None:
    """Megatron does it between prefill and decode. Control: capacities differ, as do outputs."""
    stock = ranks.run("config_case.capacities", kind="alltoall")
    ours = ranks.run("config_case.capacities", kind="uccl_ep")
    for rank, found in enumerate(ours):
        # 4 ranks of 32 tokens with 2 of 8 experts each: at a factor of 1 they send 8 rows to an expert.
        assert found["capacities"] == [2 * 4 * 32, 2 * 4 * 8, None, None]
        assert found["outputs"] == stock[rank]["outputs"]
        assert len(set(found["outputs"])) == 3  # a factor of 4 drops nothing
        assert found["config"][0] == "ConfigError"
        assert "moe_expert_capacity_factor = None" in found["config"][1]
        assert "allowed is a number >= 0" in found["config"][1]


def test_fields_that_megatron_reads_in_each_pass_are_read_in_each_pass(ranks: MegatronRanks) -> None:
    found = same_on_all(ranks.run("config_case.read_anew"))
    assert found == {"before": (False, 1, 2), "after": (True, 16, 3)}


def test_configs_that_do_not_carry_our_dispatcher_are_refused(ranks: MegatronRanks) -> None:
    """Control: with the carrier the same model verifies."""
    found = same_on_all(ranks.run("config_case.other_carriers"))
    assert found["ours"] == ("", "")
    for name in ("by default", "changed"):
        assert found[name][0] == "DispatcherMissingError", found
        assert "moe_flex_dispatcher_backend = 'deepep'" in found[name][1]
        assert "allowed is 'hybridep'" in found[name][1]
    assert found["made before"][0] == "DispatcherMissingError", found
    assert "was made before enable()" in found["made before"][1]


@pytest.mark.parametrize(("dtype", "lines"), [("fp64", 1), ("fp32", 0)])
def test_one_line_says_that_an_fp64_router_is_rounded(ranks: MegatronRanks, dtype: str, lines: int) -> None:
    said = ranks.run("config_case.said_of_the_router", dtype=dtype)
    assert [len(of_rank) for of_rank in said] == [lines, 0, 0, 0], said
    assert all("travel in fp32" in line for line in said[0])


def test_groups_that_megatron_forgot_leave_no_buffer_open(ranks: MegatronRanks) -> None:
    """Control: while a layer of before lives, its buffer stays open."""
    found = same_on_all(ranks.run("config_case.forgotten_groups"))
    assert found["in use"] == (False, 2)
    assert found["unused"] == (True, 1)
    assert found["same loss"]
    assert found["alone"] == 0


def test_a_forgotten_buffer_that_another_rank_dropped_stops_no_step(ranks: MegatronRanks) -> None:
    """Control: before its group is forgotten, its error stops the step."""
    for found in ranks.run("config_case.dropped_by_another"):
        assert found["before"] and not found["after"] and found["closed"], found


def test_a_group_of_one_rank_changes_no_config(ranks: MegatronRanks) -> None:
    found = same_on_all(ranks.run("config_case.shared_config"))
    assert found == {
        "unchanged": True,
        "names": ("flex", "alltoall"),
        "shared": (1.5, 0.25),
        "copied": ("alltoall", 7, 2),
        "pickled": "alltoall",
        "class": True,
        "verified": 2,
    }
