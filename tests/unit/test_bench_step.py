"""The step-time report: cells, model FLOPs, records and what the table says. No model is trained here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import megatron_step, step_report
from bench.flops import PEAK_FLOPS, flops_per_token, peak_flops
from bench.ideal import Ideal
from bench.step_cases import Cell, base_recipe, cells_of, parse_args, sized
from bench.step_report import Trained, broken_promise, label, records_of, table
from bench.step_split import busy_share, waiting_ms
from recipes import RECIPES
from recipes.launch import STOPPED
from recipes.measure.timing import Span
from recipes.models.deepseek_v3 import deepseek_v3
from recipes.models.qwen3 import qwen3_235b_a22b
from recipes.models.recipe import RecipeError

TINY = RECIPES["tiny_host"]()
ABOUT = {"commit": "c", "hardware": "h", "versions": {}, "link_gbytes_per_s": None}


def cells(*arguments: str) -> list[Cell]:
    args = parse_args(list(arguments))
    return cells_of(args, base_recipe(args))


def test_cells_are_the_cross_product_of_the_lists() -> None:
    found = cells(
        "--micro-batch-tokens", "256", "512", "--hidden", "128", "256", "--dispatch-dtype", "bf16", "fp8",
        "--overlap", "off", "on",
    )  # fmt: skip
    assert len(found) == len({str(cell) for cell in found}) == 16
    assert {cell.micro_batch_tokens for cell in found} == {256, 512}
    assert {cell.recipe.num_microbatches for cell in found} == {2}, "overlap needs a second micro-batch"


def test_without_options_the_cell_is_the_recipe() -> None:
    (cell,) = cells()
    tokens = TINY.micro_batch_size * TINY.sequence_length
    assert (cell.micro_batch_tokens, cell.recipe.model.hidden_size, cell.overlap) == (tokens, 128, False)
    assert cell.recipe.num_microbatches == TINY.num_microbatches


def test_sizes_keep_heads_sequences_and_the_experts_ratio() -> None:
    wide = sized(TINY, tokens=512, hidden=256, expert_ffn=None)
    assert (wide.model.num_heads, wide.model.expert_ffn_size) == (8, 1024)
    assert (wide.sequence_length, wide.micro_batch_size) == (256, 2)
    short = sized(TINY, tokens=100, hidden=None, expert_ffn=64)
    assert (short.sequence_length, short.micro_batch_size, short.model.expert_ffn_size) == (100, 1, 64)
    # Heads of a width of their own are as many as before.
    narrow = sized(RECIPES["dsv3_proxy_4xh200"](), tokens=None, hidden=2048, expert_ffn=2048).model
    assert (narrow.hidden_size, narrow.num_heads, narrow.expert_ffn_size) == (2048, 128, 2048)
    # 2048 / 7168 of 2048 are 585, which no FP8 product takes.
    narrow = sized(RECIPES["dsv3_proxy_4xh200"](), tokens=None, hidden=2048, expert_ffn=None).model
    assert narrow.expert_ffn_size == 640


@pytest.mark.parametrize("width", [585, 2056])
def test_widths_that_no_fp8_product_takes_are_refused(width: int) -> None:
    with pytest.raises(RecipeError, match=f"expert_ffn_size = {width}: .* multiple of 16"):
        sized(RECIPES["dsv3_proxy_4xh200"](), tokens=None, hidden=None, expert_ffn=width)
    assert sized(TINY, tokens=None, hidden=None, expert_ffn=width).model.expert_ffn_size == width  # BF16


@pytest.mark.parametrize("sizes", [{"tokens": 300}, {"tokens": 1000}, {"hidden": 192}, {"hidden": 100}])
def test_sizes_that_cannot_be_are_refused_and_the_other_cells_stay(sizes: dict[str, int]) -> None:
    with pytest.raises(RecipeError):
        sized(TINY, **({"tokens": None, "hidden": None, "expert_ffn": None} | sizes))
    option = "--hidden" if "hidden" in sizes else "--micro-batch-tokens"
    bad, good = cells(option, str(next(iter(sizes.values()))), "256")
    assert bad.problem and not good.problem


def test_nothing_to_measure_starts_no_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(megatron_step, "run_ranks", lambda *a, **k: started.append((a, k)) or 0)
    assert megatron_step.main(["--device=cpu", "--hidden", "100"]) == 2
    assert "hidden = 100" in capsys.readouterr().err and started == []
    assert megatron_step.main(["--device=cpu", "--num-ranks=2"]) == 0
    assert started[0][0][0] == 2 and started[0][1] == {"program": ("-m", "bench.megatron_step")}


def test_each_cell_is_a_job_and_one_that_fails_does_not_take_the_others_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []
    ends = [0, 1, 0, 0]

    def run(num_ranks: int, argv: list[str], program: tuple[str, ...]) -> int:
        started.append(argv[-1])
        return ends[len(started) - 1]

    monkeypatch.setattr(megatron_step, "run_ranks", run)
    out = tmp_path / "step"
    out.with_suffix(".json").write_text("[]")
    sweep = ["--device=cpu", "--hidden", "256", "512", "--overlap", "off", "on", f"--out={out}"]
    assert megatron_step.main(sweep) == 1
    assert started == [f"--cell={number}" for number in range(1, 5)]
    assert not out.with_suffix(".json").exists()  # results of an earlier sweep are not joined
    started.clear()
    ends[1] = STOPPED
    assert megatron_step.main(sweep) == STOPPED and len(started) == 2  # Ctrl-C
    started.clear()
    assert megatron_step.main([*sweep, "--cell", "3"]) == 0 and started == ["--cell=3"]
    with pytest.raises(SystemExit):
        megatron_step.main([*sweep, "--cell", "5"])


def a_model(config: SimpleNamespace, shared: bool) -> list[tuple[str, torch.Tensor]]:
    """Names and shapes as in a GPTModel of the local spec: L layers, H wide, F the experts."""
    layers, hidden, ffn = config.num_layers, config.hidden_size, 512
    local = config.num_moe_experts // config.expert_model_parallel_size
    shapes: dict[str, tuple[int, ...]] = {"module.embedding.word_embeddings.weight": (272, hidden)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.self_attention.linear_qkv.weight": (3 * hidden, hidden),
            f"{layer}.self_attention.linear_proj.weight": (hidden, hidden),
            f"{layer}.pre_mlp_layernorm.weight": (hidden,),
            f"{layer}.mlp.router.weight": (config.num_moe_experts, hidden),
        }
        for expert in range(local):
            shapes[f"{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"] = (ffn, hidden)
            shapes[f"{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"] = (hidden, ffn)
    if not shared:
        shapes["module.output_layer.weight"] = (272, hidden)
    return [(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]


def test_model_flops_are_those_counted_by_hand() -> None:
    """tiny_host: a layer has 4 H^2 of attention, E H of the router and 2 x 2 H F of a token's two experts."""
    config = SimpleNamespace(
        num_layers=4, hidden_size=128, num_attention_heads=4, kv_channels=32, num_moe_experts=8,
        moe_router_topk=2, expert_model_parallel_size=4, tensor_model_parallel_size=1,
        expert_tensor_parallel_size=None, pipeline_model_parallel_size=1,
    )  # fmt: skip
    layer = 4 * 128**2 + 8 * 128 + 2 * 2 * 128 * 512
    by_hand = 6 * (4 * layer + 272 * 128) + 6 * 4 * 256 * 128
    assert flops_per_token(a_model(config, shared=True), config, 256) == by_hand == 8884224
    assert flops_per_token(a_model(config, shared=False), config, 256) == by_hand
    config.expert_model_parallel_size = 1  # where the experts are does not matter
    assert flops_per_token(a_model(config, shared=True), config, 256) == by_hand
    config.moe_router_topk = 1  # how many a token uses does
    assert flops_per_token(a_model(config, shared=True), config, 256) == by_hand - 6 * 4 * 2 * 128 * 512
    config.multi_latent_attention, config.v_head_dim = True, 32
    config.qk_head_dim, config.qk_pos_emb_head_dim = 32, 16  # a query is 16 wider, the mean 8
    wider = by_hand - 6 * 4 * 2 * 128 * 512 + 6 * 4 * 256 * 4 * 8
    assert flops_per_token(a_model(config, shared=True), config, 256) == wider
    config.tensor_model_parallel_size = 2
    assert flops_per_token(a_model(config, shared=True), config, 256) is None, "a rank has half of it"


def test_peaks_are_found_by_name_and_never_guessed() -> None:
    assert peak_flops("NVIDIA H200") == 989.4e12
    assert peak_flops("NVIDIA H200 NVL") == 835e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H20") == 148e12
    for unknown in ("CPU", "NVIDIA H2000", "NVIDIA H100 80GB", "AMD Instinct MI300X", ""):
        assert peak_flops(unknown) is None, unknown
    assert all(1e14 < value < 1e16 for value in PEAK_FLOPS.values())


def trained(
    dispatcher: str,
    factor: float = 1.0,
    losses: tuple[float, ...] = (5.0, 4.0, 3.0),
    deterministic: bool = True,
) -> Trained:
    wall_ms = factor * torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    return Trained(
        dispatcher=dispatcher, losses_RN=[list(losses), list(losses)], wall_ms=wall_ms, cpu_ms=2 * wall_ms,
        dispatch_ms=0.2 * wall_ms, combine_ms=0.1 * wall_ms, waiting_ms=0.05 * wall_ms, wire_bytes=10**9,
        gpu_busy=None, slowest_rank=1, deterministic=deterministic,
        flops_per_token=1e6, peak_torch_bytes=None, outside_torch_bytes=1 << 20, rss_bytes=1 << 30,
    )  # fmt: skip


BF16 = cells("--micro-batch-tokens", "1024")[0]


def test_records_of_what_ran_and_what_did_not_have_the_same_fields() -> None:
    entries = [trained("uccl_ep", 0.5), trained("alltoall")]
    found = records_of(BF16, entries, {"allgather": "AssertionError: no"}, ABOUT)
    assert [r["system"] for r in found] == ["uccl_ep", "alltoall", "allgather"]
    assert all(list(r) == list(found[0]) for r in found)
    ours, stock, refused = found
    assert (ours["median_ms"], ours["p10_ms"], ours["p90_ms"]) == (10.0, 6.0, 14.0)
    assert ours["comm_share"] == 0.3 and ours["slowest_rank"] == 1
    assert ours["tokens_per_s_per_rank"] == 1024 / 0.010
    assert ours["tflops_per_rank"] == pytest.approx(1024 / 0.010 * 1e6 / 1e12)
    assert ours["mfu"] is None and ours["peak_flops_per_rank"] is None, "invented for a CPU"
    assert (ours["speedup"], stock["speedup"]) == (2.0, None)
    assert ours["equals_stock"] is True and ours["loss_difference"] == 0.0
    assert refused["not_run"] and refused["median_ms"] is None


def test_utilisation_is_of_the_peak_of_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_report, "device_name", lambda _device: "NVIDIA H200")
    (record,) = records_of(BF16, [trained("alltoall")], {}, ABOUT)
    assert record["mfu"] == round(1024 / 0.020 * 1e6 / 989.4e12, 4)


def test_a_dispatcher_that_is_slower_is_called_so() -> None:
    slow = table(records_of(BF16, [trained("uccl_ep", 2.0), trained("alltoall")], {}, ABOUT))
    assert "0.50 x as fast as alltoall" in slow and "SLOWER than alltoall" in slow
    fast = table(records_of(BF16, [trained("uccl_ep", 0.5), trained("alltoall")], {}, ABOUT))
    assert "2.00 x as fast as alltoall" in fast and "SLOWER" not in fast
    # Of both: utilisation, torch's memory, the wire's time and what it leaves, how busy a GPU is.
    assert fast.count("not known") == 2 * 5, fast


def test_losses_that_have_to_be_equal_and_are_not_break_the_promise() -> None:
    other = trained("uccl_ep", losses=(5.0, 4.0, 3.0 + 1e-15))
    ours, stock = records_of(BF16, [other, trained("alltoall")], {}, ABOUT)
    assert "other losses" in broken_promise(ours) and broken_promise(stock) == ""
    assert "differ from alltoall's" in table([ours])
    equal, _ = records_of(BF16, [trained("uccl_ep"), trained("alltoall")], {}, ABOUT)
    assert broken_promise(equal) == "" and "to the last bit" in table([equal])
    alone, *_ = records_of(BF16, [trained("uccl_ep")], {}, ABOUT)
    assert broken_promise(alone) == "", "nothing to compare with"
    fp8, *_ = records_of(cells("--dispatch-dtype", "fp8")[0], [other, trained("alltoall")], {}, ABOUT)
    assert broken_promise(fp8) == "", "FP8 rounds"
    loose = trained("uccl_ep", losses=(5.0, 4.0, 3.1), deterministic=False)
    varying, *_ = records_of(BF16, [loose, trained("alltoall")], {}, ABOUT)
    assert broken_promise(varying) == "", "stock would differ from itself"


def test_the_png_is_drawn_from_what_ran(tmp_path: Path) -> None:
    found = records_of(BF16, [trained("uccl_ep", 0.5), trained("alltoall")], {"allgather": "no"}, ABOUT)
    step_report.write_png(found, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert label(found[0]) == "1024 x 1 tokens, H=128"


def test_dispatch_and_combine_are_split_into_waiting_wire_and_the_rest() -> None:
    about = ABOUT | {"link_gbytes_per_s": 500.0}
    (record,) = records_of(BF16, [trained("uccl_ep", 10.0)], {}, about)
    assert record["dispatch_ms"] + record["combine_ms"] == 60.0
    assert (record["waiting_ms"], record["wire_ms"], record["own_ms"]) == (10.0, 2.0, 48.0)
    (unknown,) = records_of(BF16, [trained("uccl_ep", 10.0)], {}, ABOUT)
    assert (unknown["waiting_ms"], unknown["wire_ms"], unknown["own_ms"]) == (10.0, None, None)


def test_a_rank_waits_from_where_it_begins_until_the_last_one_begins() -> None:
    def spans(*starts: float, kind: str = "dispatch") -> list[Span]:
        between = [Span("combine", False, 100.0, 900.0)]  # rows do not move: nobody is waited for
        return [*between, *(Span(kind, True, start, start + 7.0) for start in starts)]

    assert waiting_ms([spans(1.0, 20.0), spans(4.0, 10.0)]) == [3.0, 10.0]
    assert waiting_ms([spans(5.0), spans(5.0)]) == [0.0, 0.0]
    assert waiting_ms([spans(1.0), spans(4.0, kind="combine")]) is None
    assert waiting_ms([spans(1.0), spans(4.0, 10.0)]) is None


def test_a_gpu_is_busy_where_anything_runs() -> None:
    assert busy_share([(0.0, 4.0), (2.0, 5.0), (9.0, 10.0), (3.0, 4.0)]) == 0.6
    assert busy_share([(5.0, 6.0)]) == 1.0 and busy_share([]) == 0.0


def test_experts_and_topk_are_options_and_groups_of_experts_go() -> None:
    (cell,) = cells("--recipe", "deepseek_v3_rank", "--experts", "16", "--topk", "8")
    model = cell.recipe.model
    assert (model.num_experts, model.topk, model.router.num_groups) == (16, 8, None)
    with pytest.raises(RecipeError, match=r"topk = 9: allowed is 1 \.\. 8"):
        cells("--experts", "8", "--topk", "9")


@pytest.mark.parametrize("name", ["deepseek_v3_rank", "qwen3_235b_rank"])
def test_a_rank_of_a_job_has_its_experts_and_rows(name: str) -> None:
    recipe = RECIPES[name]()
    rows = recipe.micro_batch_size * recipe.sequence_length * recipe.model.topk
    assert 4 <= recipe.model.num_experts // recipe.num_ranks <= 8 and 16_000 <= rows <= 33_000
    full = (deepseek_v3() if "deepseek" in name else qwen3_235b_a22b()).model
    for width in ("hidden_size", "expert_ffn_size", "num_heads"):
        assert getattr(recipe.model, width) == getattr(full, width)


def test_the_ideal_dispatcher_gives_each_expert_alike_and_moves_nothing() -> None:
    tokens, hidden, topk, experts = 5, 128, 2, 3
    dispatcher = SimpleNamespace()
    Ideal(dispatcher, experts, topk)
    x = torch.ones(tokens, 1, hidden, requires_grad=True)
    probs = torch.ones(tokens, 6, requires_grad=True)
    moved, weights = dispatcher.dispatch_preprocess(x, None, probs)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(moved, weights))
    assert counts.tolist() == [4, 3, 3] and rows.shape == (10, hidden) and row_probs.shape == (10,)
    out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(2 * rows)))
    assert out.shape == x.shape
    (out.sum() + row_probs.sum()).backward()
    assert x.grad is not None and not x.grad.any() and probs.grad is not None and not probs.grad.any()
