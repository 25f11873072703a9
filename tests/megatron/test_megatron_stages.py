"""Our six stages and those of Megatron's all-to-all dispatcher return the same bits, gradients included."""

from __future__ import annotations

import dataclasses

import pytest

from tests.megatron.harness import CaseError, MegatronRanks
from tests.megatron.settings import StageCase

LAYOUTS = {"1x4": 4, "2x2": 2, "4x1": 1}  # domains x ranks: domain size
EVERYTHING = {"rows", "tokens_per_expert", "row_probs", "output", "hidden_grad", "probs_grad"}

CASES = {
    "bf16": StageCase(),
    "fp32": StageCase(dtype="fp32"),
    "ep2": StageCase(ep=2),
    "one local expert": StageCase(experts=4),
    "top-1": StageCase(topk=1),
    "unequal and zero tokens": StageCase(tokens=(7, 0, 33, 1)),
    "no tokens at all": StageCase(tokens=(0, 0, 0, 0)),
    "all tokens to two experts": StageCase(routing="one_expert"),
    "dropped tokens": StageCase(routing="dropped", capacity_factor=8.0),
    "a routed probability of zero": StageCase(routing="zero_probs"),
    "capacity": StageCase(capacity_factor=0.75),
    "capacity with padding": StageCase(capacity_factor=0.75, pad_to_capacity=True),
    "capacity above what is routed": StageCase(capacity_factor=2.0, pad_to_capacity=True),
    "captured with padded capacity": StageCase(capacity_factor=0.75, pad_to_capacity=True, captured=True),
    "quantisation padding": StageCase(quantization_padding=True),
    "quantisation padding, fp32": StageCase(quantization_padding=True, dtype="fp32", tokens=(40, 24, 31, 17)),
    "room for whatever comes": StageCase(rank_capacity=4.0, tokens=(24, 24, 24, 24)),
    "rows of no multiple of 128": StageCase(hidden=160),
    "rows of no multiple of 32": StageCase(hidden=144),
    "router in bf16": StageCase(router_dtype="bf16"),
}


def differences(ranks: MegatronRanks, case: StageCase) -> set[str]:
    """Names of what differs on some rank."""
    return {
        name
        for result in ranks.run("stage_case.compare", case=case)
        for name in result
        if result[name] != 0.0
    }


@pytest.mark.parametrize("name", CASES)
def test_every_stage_is_bitwise_equal_to_alltoall(ranks: MegatronRanks, name: str) -> None:
    assert differences(ranks, CASES[name]) == set()


def test_an_fp64_router_gets_its_dtype_back_and_fp32_gradients(ranks: MegatronRanks) -> None:
    for result in ranks.run("stage_case.compare", case=StageCase(router_dtype="fp64")):
        assert 0.0 < result.pop("probs_grad") < 1e-6
        assert set(result.values()) == {0.0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_domain_layout_changes_no_bit(ranks: MegatronRanks, layout: str) -> None:
    case = StageCase(options={"domain_size": LAYOUTS[layout]}, tokens=(24, 5, 0, 40))
    assert differences(ranks, case) == set()


def test_domains_that_interleave_change_no_bit(ranks: MegatronRanks) -> None:
    assert differences(ranks, StageCase(options={"domains": (0, 1, 0, 1)})) == set()
    assert differences(ranks, StageCase(options={"domains": (0, 0, 1, 0)})) == set()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_expert_input_is_bitwise_equal_with_expert_tp(ranks: MegatronRanks, dtype: str) -> None:
    """The output is a sum over expert TP whose rounding differs; what the experts see does not."""
    case = StageCase(dtype=dtype, tp=2, etp=2, ep=2, tokens=(24, 24, 8, 8))
    assert differences(ranks, case) <= {"output", "hidden_grad", "probs_grad"}
    captured = StageCase(
        dtype=dtype, tp=2, etp=2, ep=2, capacity_factor=0.75, pad_to_capacity=True, captured=True
    )
    assert differences(ranks, captured) <= {"output", "hidden_grad", "probs_grad"}


def test_fp32_sums_of_top_2_with_expert_tp_are_within_5e_7_of_stocks(ranks: MegatronRanks) -> None:
    case = StageCase(dtype="fp32", tp=2, etp=2, ep=2, tokens=(24, 24, 8, 8))
    results = ranks.run("stage_case.compare", case=case)
    farthest = max(result[name] for result in results for name in ("output", "hidden_grad", "probs_grad"))
    assert 0.0 < farthest <= 5e-7, farthest


MANY = {
    "of all expert tp ranks": StageCase(
        dtype="fp32", tp=2, etp=2, ep=2, experts=64, topk=20, tokens=(24, 24, 8, 8)
    ),
    "by quantisation padding": StageCase(
        dtype="fp32", experts=256, topk=8, quantization_padding=True, tokens=(24, 17, 0, 33)
    ),
}


@pytest.mark.parametrize("why", MANY)
def test_a_token_may_go_to_more_than_32_experts(ranks: MegatronRanks, why: str) -> None:
    for result in ranks.run("stage_case.compare", case=MANY[why]):
        sums = {name: result.pop(name) for name in ("output", "hidden_grad", "probs_grad")}
        assert set(result.values()) == {0.0}
        assert max(sums.values()) <= 1e-6, sums


def test_shared_experts_get_rows_in_all_to_alls_shape(ranks: MegatronRanks) -> None:
    """On which the order of a gradient's sum depends."""
    for found in ranks.run("stage_case.shared_expert_shapes"):
        assert found == {
            "rows": [24, 128], "given": [24, 1, 128], "options": {"wait_current_stream": False},
            "returned": True, "others": 3,
        }  # fmt: skip


def test_a_rank_without_room_says_so_and_has_room_once_its_budget_has_grown(ranks: MegatronRanks) -> None:
    """What Megatron does from 0.17 on: over budget, repeat the step without a budget, grow, go on."""
    found = ranks.run("stage_case.over_budget")
    needed = 4 * 24 * 2  # every token's two experts are on rank 0
    assert found[0] == {
        "room": [96, needed, needed],
        "over": [True, False, False],
        "required": needed,
        "kept": True,
        "grown": True,
    }
    for other in found[1:]:  # nothing comes, and each has its room
        assert other["room"] == [96, 0, 96]
        assert other["over"] == [False] * 3 and other["required"] == 0


PADDED = StageCase(capacity_factor=0.75, pad_to_capacity=True)


@pytest.mark.parametrize(
    "case", [PADDED, dataclasses.replace(PADDED, quantization_padding=True)], ids=["plain", "quantised"]
)
def test_counts_known_beforehand_change_no_bit(ranks: MegatronRanks, case: StageCase) -> None:
    """The host then reads none, as in a graph. (Stock adds no padding of quantisation to a capacity.)"""
    for result in ranks.run("stage_case.compare_captured", case=case):
        assert result.keys() == EVERYTHING and set(result.values()) == {0.0}


def test_a_graph_whose_counts_were_other_ones_is_an_error(ranks: MegatronRanks) -> None:
    """A rank has fewer tokens, so its padded capacity is another; counts that are read would allow it."""
    uneven = dataclasses.replace(PADDED, tokens=(24, 24, 24, 16))
    with pytest.raises(CaseError, match="all ranks of the group need the same number of"):
        ranks.run("stage_case.compare_captured", case=uneven)


def test_a_graph_without_counts_names_megatrons_options(ranks: MegatronRanks) -> None:
    with pytest.raises(CaseError, match=r"ConfigError: .*allowed are moe_pad_expert_input_to_capacity"):
        ranks.run("stage_case.compare_captured", case=StageCase())


def test_expert_tensor_parallel_parity_depends_on_the_source_order(ranks: MegatronRanks) -> None:
    """Control for the test above: in plain rank order the rows arrive in another order."""
    case = StageCase(tp=2, etp=2, ep=2, corrupt="rank_order")
    assert "rows" in differences(ranks, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("topk", [4, 6, 8])
def test_sums_over_many_experts_are_as_exact_as_alltoall(
    ranks: MegatronRanks, topk: int, layout: str
) -> None:
    """Above top-2 the order of sums matters: FP32 within 1e-6 of stock, BF16 within twice stock's error."""
    case = StageCase(experts=16, topk=topk, options={"domain_size": LAYOUTS[layout]})
    for result in ranks.run("stage_case.sums", case=dataclasses.replace(case, dtype="fp32")):
        assert all(distance <= 1e-6 for _, _, distance in result.values()), result
    results = ranks.run("stage_case.sums", case=case)
    for name in ("output", "hidden_grad"):
        stock_error = max(result[name][0] for result in results)
        our_error = max(result[name][1] for result in results)
        assert 0.0 < our_error <= 2.0 * stock_error


def test_a_lost_row_is_above_the_error_of_a_sum(ranks: MegatronRanks) -> None:
    """Control for the test above."""
    case = StageCase(experts=16, topk=4, corrupt="zero_row")
    results = ranks.run("stage_case.sums", case=case)
    assert max(r["output"][1] for r in results) > 2.0 * max(r["output"][0] for r in results)


@pytest.mark.parametrize(
    ("corrupt", "noticed"),
    [("zero_row", {"output", "hidden_grad"}), ("zero_prob_grad", {"probs_grad"})],
)
def test_a_fault_is_noticed(ranks: MegatronRanks, corrupt: str, noticed: set[str]) -> None:
    """Control for all above. A dispatcher without probability gradients passes Megatron's own tests."""
    assert noticed <= differences(ranks, StageCase(corrupt=corrupt))


def test_guessing_the_map_from_the_probabilities_would_be_noticed(ranks: MegatronRanks) -> None:
    """Control: with routed probabilities of zero, and with padding, the map cannot be had from them."""
    zero_probs = dataclasses.replace(CASES["a routed probability of zero"], corrupt="topk_of_probs")
    assert "rows" in differences(ranks, zero_probs)
    padded = dataclasses.replace(CASES["capacity with padding"], corrupt="topk_of_probs")
    assert "rows" in differences(ranks, padded)
