"""The step-time report: cells, model FLOPs, records and what the table says. No model is trained here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import megatron_step, step_report
from bench.flops import PEAK_FLOPS, flops_per_token, peak_flops
from bench.step_cases import Cell, base_recipe, cells_of, parse_args, sized
from bench.step_report import Trained, broken_promise, label, records_of, table
from recipes import RECIPES
from recipes.settings import RecipeError

TINY = RECIPES["tiny_host"]()
ABOUT = {"commit": "c", "hardware": "h", "versions": {}}


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
    assert (cell.micro_batch_tokens, cell.recipe.model.hidden_size, cell.overlap) == (1024, 128, False)
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


@pytest.mark.parametrize("sizes", [{"tokens": 300}, {"tokens": 0}, {"hidden": 192}, {"hidden": 100}])
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
        dispatch_ms=0.2 * wall_ms, combine_ms=0.1 * wall_ms, slowest_rank=1, deterministic=deterministic,
        flops_per_token=1e6, peak_torch_bytes=None, outside_torch_bytes=1 << 20, rss_bytes=1 << 30,
    )  # fmt: skip


BF16 = cells()[0]


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
    assert fast.count("not known") == 4, fast  # utilisation and torch's memory of both


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
