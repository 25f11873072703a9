"""What the benchmark measures: cases, routing, bytes, capacity. No ranks needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.cases import BACKWARD, ROUTINGS, Case, Traffic, draw_routing
from bench.options import PRESETS, cases_of, parse_args
from bench.trace import BUNDLED, TraceError, load_trace
from recipes import RECIPES
from recipes.measure.router_trace import RouterTrace


def a_case(**changes: object) -> Case:
    values: dict[str, object] = {
        "tokens": 64, "hidden": 256, "topk": 2, "experts": 8, "ranks": 4, "domains": 1, "dtype": "bf16",
        "routing": "uniform", "link_gbytes_per_s": 0.0,
    }  # fmt: skip
    return Case(**(values | changes))  # type: ignore[arg-type]


def a_traced_case(**changes: object) -> Case:
    return a_case(routing="trace", trace=str(BUNDLED), **changes)


# ------------------------------------------------------------------------------- options


def test_the_default_sweep_stays_small() -> None:
    assert [(c.tokens, c.domains, c.dtype) for c in cases_of(parse_args([]), 4)] == [
        (1024, 1, "bf16"), (1024, 1, "fp8"), (1024, 2, "bf16"), (1024, 2, "fp8")
    ]  # fmt: skip


def test_the_ht_preset_is_the_sweep_of_the_goals() -> None:
    cases = cases_of(parse_args(["--preset", "ht"]), 8)
    assert {(c.hidden, c.topk, c.experts, c.routing, c.num_sms) for c in cases} == {
        (7168, 8, 256, "uniform", 24)
    }
    assert sorted((c.dtype, c.stage_sms, c.tokens) for c in cases) == [
        (dtype, stage_sms, tokens)
        for dtype in ("bf16", "fp8")
        for stage_sms in (0, 100)
        for tokens in (128, 512, 1024, 2048, 4096, 8192)
    ]
    assert parse_args(["--preset", "ht"]).runs >= 20
    assert not any(case.problem for case in cases)


@pytest.mark.parametrize("argv", [["--preset", "ht", "--tokens", "7"], ["--tokens", "7", "--preset", "ht"]])
def test_an_option_overrides_the_preset(argv: list[str]) -> None:
    args = parse_args(argv)
    assert args.tokens == [7] and args.hidden == PRESETS["ht"]["hidden"]


def test_sms_are_an_axis_of_the_sweep() -> None:
    args = parse_args(["--num-sms", "8", "24", "--stage-sms", "0", "132", "--domains", "1", "--dtype", "fp8"])
    found = [(case.num_sms, case.stage_sms) for case in cases_of(args, 4)]
    assert found == [(8, 0), (8, 132), (24, 0), (24, 132)]
    assert {case.stage_sms for case in cases_of(parse_args([]), 4)} == {0}


@pytest.mark.parametrize(
    ("num_sms", "stage_sms", "title"),
    [
        (0, 0, ""),
        (24, 0, ", 24 SMs"),
        (24, 132, ", 24 SMs, 132 for staging"),
        (0, 132, ", 132 SMs for staging"),
    ],
)
def test_the_title_names_the_sms_of_staging_if_they_are_its_own(
    num_sms: int, stage_sms: int, title: str
) -> None:
    assert str(a_case(num_sms=num_sms, stage_sms=stage_sms)).endswith(f"bf16, uniform{title}")


def test_a_case_says_why_nothing_can_run_it() -> None:
    assert "3 domains" in a_case(domains=3).problem
    assert "6 experts" in a_case(experts=6).problem
    assert "top-9 of 8" in a_case(topk=9).problem
    assert "16 SMs for staging" in a_case(num_sms=24, stage_sms=16).problem
    assert a_case().problem == a_case(num_sms=24, stage_sms=24).problem == a_case(num_sms=24).problem == ""


# ------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_gives_each_token_distinct_experts_and_weights_of_sum_one(routing: str) -> None:
    case = a_case(routing=routing, trace=str(BUNDLED))
    topk_idx, weights = draw_routing(case, seed=3)
    assert topk_idx.shape == weights.shape == (case.ranks, case.tokens, case.topk)
    assert topk_idx.dtype == torch.int64 and 0 <= int(topk_idx.min()) <= int(topk_idx.max()) < case.experts
    ordered = topk_idx.sort(-1).values
    assert bool((ordered[..., 1:] != ordered[..., :-1]).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(case.ranks, case.tokens))
    assert torch.equal(topk_idx, draw_routing(case, seed=3)[0])
    assert not torch.equal(topk_idx, draw_routing(case, seed=4)[0])


def test_skewed_routing_is_skewed() -> None:
    shares = {}
    for routing in ("uniform", "zipf", "one_hot"):
        topk_idx, _ = draw_routing(a_case(routing=routing, tokens=1024, experts=32), seed=5)
        shares[routing] = float(torch.bincount(topk_idx.flatten(), minlength=32).max()) / (4 * 1024)
    assert shares["uniform"] < 0.1 < 0.3 < shares["zipf"] < shares["one_hot"] == 1.0


def test_the_bundled_trace_is_small_real_and_skewed() -> None:
    trace, recipe = load_trace(str(BUNDLED)), RECIPES["tiny_host"]()
    assert BUNDLED.stat().st_size <= 200_000
    assert (trace.topk, trace.num_experts) == (recipe.model.topk, recipe.model.num_experts)
    # Four ranks of four sequences of 256: it was recorded with the batches that the recipe had then.
    assert trace.topk_idx_SLTK.shape[1:3] == (recipe.model.num_layers, 4 * 4 * 256)
    load = torch.bincount(trace.topk_idx_SLTK[0, 0].flatten().long(), minlength=trace.num_experts)
    assert int(load.max()) > 2 * float(load.float().mean())


def test_a_trace_is_drawn_as_neighbours_of_one_layer(tmp_path: Path) -> None:
    numbered = np.arange(2 * 3 * 5).reshape(2, 3, 5, 1)  # each token has an expert of its own
    path = save_trace(tmp_path / "t.npz", numbered, 30)
    drawn = load_trace(path).draw(10, torch.Generator().manual_seed(0)).flatten().tolist()
    layer = drawn[0] // 5 % 3
    tokens = [15 * step + 5 * layer + token for step in range(2) for token in range(5)]
    start = tokens.index(drawn[0])
    assert drawn == tokens[start:] + tokens[:start]


def test_traced_cases_take_their_experts_from_the_trace_or_say_what_differs() -> None:
    one = ["--dtype", "fp8", "--domains", "1"]
    traced, other = cases_of(parse_args([*one, "--routing", "trace", "uniform"]), 4)
    assert (traced.topk, traced.experts, traced.problem) == (2, 8, "")
    assert (other.topk, other.experts, other.trace) == (4, 32, "")
    (refused,) = cases_of(parse_args([*one, "--routing", "trace", "--topk", "4"]), 4)
    assert refused.problem == "the trace is of top-2 of 8, not top-4 of 8"
    assert "16384 tokens" in a_traced_case(tokens=8192).problem
    assert a_traced_case(tokens=4096).problem == ""


def save_trace(path: Path, topk_idx: np.ndarray, num_experts: int) -> str:
    np.savez_compressed(path, topk_idx=topk_idx.astype(np.int16), num_experts=np.array(num_experts))
    return str(path)


@pytest.mark.parametrize(
    ("topk_idx", "complaint"),
    [
        (np.zeros((1, 1, 2, 2)), "an expert twice"),
        (np.full((1, 1, 2, 1), 8), "from 8 to 8, there are 8"),
        (np.full((1, 1, 2, 1), -1), "from -1"),
        (np.zeros((2, 2)), r"not integers \[S, L, T, K\]"),
    ],
)
def test_a_file_that_is_no_routing_is_refused(topk_idx: np.ndarray, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=complaint):
        load_trace(save_trace(tmp_path / "bad.npz", topk_idx, 8))


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("nothing")
    for name in ("absent.npz", "text.npz"):
        with pytest.raises(TraceError, match="is no router trace"):
            load_trace(str(tmp_path / name))


class _Layer:
    """With a router that gives every token the expert of its input and the next one."""

    class Router(torch.nn.Module):
        def forward(self, first_T: torch.Tensor) -> tuple[None, torch.Tensor]:
            map_TE = torch.zeros(len(first_T), 8, dtype=torch.bool)
            both_T2 = torch.stack([first_T, (first_T + 1) % 8], 1)
            return None, map_TE.scatter(1, both_T2, True)

    def __init__(self) -> None:
        self.router = self.Router()


def test_what_a_recipe_saves_is_a_trace(tmp_path: Path) -> None:
    recipe, layers = replace(RECIPES["tiny_host"](), num_steps=240), [_Layer(), _Layer()]
    path = tmp_path / "new" / "trace.npz"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trace = RouterTrace(path, layers, recipe)
        for step in range(1, recipe.num_steps + 1):
            for number, layer in enumerate(layers):
                layer.router(torch.tensor([step % 8, number]))
            layers[0].router.eval()(torch.tensor([7]))  # validation is not part of it
            layers[0].router.train()
            trace.after_step(step)
    finally:
        dist.destroy_process_group()
    found = load_trace(str(path)).topk_idx_SLTK
    assert found.shape == (4, 2, 2, 2)
    assert found[-1, 1].tolist() == [[0, 1], [1, 2]]  # step 240, layer 1
    assert found[0].tolist() == [[[4, 5], [0, 1]], [[4, 5], [1, 2]]]  # step 60


# --------------------------------------------------------------------------------- bytes


def by_hand(dtype: str = "bf16") -> Traffic:
    """Two ranks, experts 0 and 1 on rank 0, which sends 3 pairs in 2 rows to rank 1 and gets one."""
    case = a_case(ranks=2, experts=4, tokens=2, dtype=dtype)
    return Traffic(case, torch.tensor([[[2, 3], [0, 2]], [[1, 2], [2, 3]]]))


def test_bytes_of_each_operation_by_hand() -> None:
    traffic, row = by_hand(), 512
    assert traffic.pairs_NN.tolist() == [[1, 3], [1, 3]]
    assert traffic.row_wire("dispatch") == (2 * row + 3 * 4, 0)
    assert traffic.row_wire("combine") == (2 * row, 0)
    assert traffic.row_wire(BACKWARD) == (4 * 2 * row + 2 * 3 * 4, 0)
    assert traffic.pair_wire("dispatch") == (3 * (row + 4), 0)
    assert traffic.pair_wire(BACKWARD) == (4 * 3 * row + 2 * 3 * 4, 0)
    assert traffic.logical_bytes() == 6 * row


def test_fp8_halves_rows_of_dispatch_and_of_gradients_only_if_they_are_sent_so() -> None:
    bf16, fp8 = by_hand(), by_hand("fp8")
    saved = bf16.row_wire("dispatch")[0] - fp8.row_wire("dispatch")[0]
    assert saved == 2 * (512 - 256 - 16)
    assert fp8.row_wire("combine") == bf16.row_wire("combine")
    assert bf16.row_wire(BACKWARD)[0] - fp8.row_wire(BACKWARD)[0] == saved
    assert bf16.row_wire(BACKWARD)[0] - fp8.row_wire(BACKWARD, "fp8")[0] == 2 * saved


def test_rows_cross_to_a_domain_once() -> None:
    case = a_case(ranks=4, domains=2, experts=4, tokens=1)
    # Rank 0's token goes to both ranks of domain 1, the other tokens stay on their ranks' domain.
    traffic = Traffic(case, torch.tensor([[[2, 3]], [[0, 1]], [[2, 3]], [[2, 3]]]))
    assert traffic.row_wire("combine")[1] == 512
    assert traffic.pair_wire("combine")[1] == 2 * 512


@pytest.mark.parametrize(("pairs", "capacity"), [(1, 128), (116, 128), (117, 256), (1024, 1152)])
def test_capacity_is_the_fullest_ranks_rows_and_a_tenth_in_steps_of_128(pairs: int, capacity: int) -> None:
    case = a_case(ranks=2, experts=2, topk=1, tokens=pairs)
    to_rank_1 = torch.ones(2, pairs, 1, dtype=torch.int64)
    to_rank_1[1] = 0  # each rank's tokens go to the other: `pairs` rows for each
    assert Traffic(case, to_rank_1).capacity_rows() == capacity
