"""From a recipe to what is started: Megatron-LM's arguments, and refusals before anything starts."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes import PRETRAININGS, RECIPES, launch
from recipes.launch import chosen_job, parse_args
from recipes.models.recipe import RecipeError
from recipes.plan import arguments, jobs
from recipes.plan.hardware import NODES
from recipes.training import pretrain
from uccl_ep_train.settings.checks import MAX_GPU_RANKS

ROOT = Path(__file__).resolve().parents[2]
BIG = ["--recipe=qwen3_30b_a3b", "--hardware=h200"]


def test_every_recipe_is_known_by_its_own_name() -> None:
    for table in (RECIPES, PRETRAININGS):
        for name, make in table.items():
            assert make().name == name
    assert not set(RECIPES) & set(PRETRAININGS)


def test_every_full_size_recipe_has_a_layout_for_every_node_type() -> None:
    for make in PRETRAININGS.values():
        assert set(make().layouts) == set(NODES)


@pytest.mark.parametrize("name", PRETRAININGS)
def test_a_layout_fills_whole_nodes_and_whole_steps(name: str) -> None:
    for hardware, layout in PRETRAININGS[name]().layouts.items():
        assert layout.num_ranks % NODES[hardware].gpus == 0
        assert layout.dp % layout.ep == 0
        assert layout.global_batch_size % (layout.dp * layout.micro_batch_size) == 0
        assert layout.num_microbatches >= layout.pp, "the pipeline never fills"
        assert layout.ep <= MAX_GPU_RANKS


def test_the_largest_group_is_that_of_the_cuda_backend() -> None:
    header = (ROOT / "csrc" / "backend" / "gpu" / "layout.h").read_text()
    found = re.search(r"constexpr uint32_t kMaxGpuRanks = (\d+);", header)
    assert found and int(found[1]) == MAX_GPU_RANKS


def test_arguments_become_words_as_megatron_lm_parses_them() -> None:
    words = arguments.command_line(
        {
            "num_layers": 3,
            "swiglu": True,
            "bf16": False,
            "kv_channels": None,
            "window_size": (127, 0),
            "moe_layer_freq": [0, 1, 1],
            "recompute_modules": ["moe", "layernorm"],
        }
    )
    assert words == [
        "--num-layers", "3", "--swiglu", "--window-size", "127,0", "--moe-layer-freq", "[0,1,1]",
        "--recompute-modules", "moe", "layernorm",
    ]  # fmt: skip


def test_a_dispatcher_is_what_megatron_calls_it() -> None:
    wanted = {
        "uccl_ep": ("uccl_ep", None),
        "alltoall": ("alltoall", None),
        "flex-deepep": ("flex", "deepep"),
        "flex-hybridep": ("flex", "hybridep"),
    }
    for name, (kind, backend) in wanted.items():
        found = chosen_job(parse_args([*BIG, f"--token-dispatcher={name}"])).arguments
        assert found["moe_token_dispatcher_type"] == kind
        assert found.get("moe_flex_dispatcher_backend") == backend
        assert ("uccl_ep_dispatch_dtype" in found) == (name == "uccl_ep")


def test_options_override_a_full_size_recipe() -> None:
    options = ["--dispatch-dtype=bf16", "--grad-dtype=fp8", "--steps=7", "--seed=5", "--num-ranks=16"]
    job = chosen_job(parse_args([*BIG, *options]))
    assert job.arguments["uccl_ep_dispatch_dtype"] == "bf16"
    assert job.arguments["uccl_ep_grad_dtype"] == "fp8"
    assert (job.arguments["train_iters"], job.arguments["seed"], job.layout.num_ranks) == (7, 5, 16)
    assert job.layout.num_microbatches == 32


def test_groups_and_domains_of_any_size_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    plain = chosen_job(parse_args(BIG))
    job = chosen_job(parse_args([*BIG, "--dry-run", "--ep=32", "--domain-size=16"]))
    assert (job.layout.ep, job.domain_size, job.layout.num_ranks) == (32, 16, 32)
    assert job.arguments["expert_model_parallel_size"] == 32
    assert (plain.layout.ep, plain.domain_size) == (8, 8), "control"
    assert parse_args(["--dry-run", "--ep=128"]).recipe == "deepseek_v3"
    assert parse_args(["--dry-run"]).recipe == "tiny_host"
    assert launch.main([*BIG, "--dry-run", "--domain-size=9"]) == 2
    assert "domain_size = 9: allowed is 1 .. 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-ranks=12"], "num_ranks = 12: allowed are multiples of 8"),
        (["--num-ranks=24"], "24 data parallel ranks do not divide the 512 sequences"),
        (["--token-dispatcher=allgather"], "token_dispatcher = allgather"),
        (["--ep=24"], "ep = 24: allowed is one of [1, 2, 4, 8, 16, 32, 64, 128]: 128 experts"),
        (["--ep=0"], "ep = 0"),
        (["--ep=32", "--num-ranks=24"], "num_ranks = 24: allowed are multiples of 32"),
        (["--hardware=mi300x", "--token-dispatcher=uccl_ep"], "uccl_ep has no HIP backend"),
    ],
)
def test_what_cannot_run_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecipeError):
        chosen_job(parse_args([*BIG, *options]))
    for more in ([], ["--dry-run"]):
        assert launch.main([*BIG, *options, *more]) == 2
        assert words in capsys.readouterr().err


def test_the_dispatcher_that_cannot_run_is_not_chosen_silently() -> None:
    job = chosen_job(parse_args(["--recipe=kimi_k2", "--hardware=mi300x"]))
    assert job.dispatcher == "alltoall" and job.why_dispatcher
    for recipe in PRETRAININGS:
        job = chosen_job(parse_args([f"--recipe={recipe}"]))
        assert job.dispatcher == "uccl_ep" and not job.why_dispatcher


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pretrain_gpt.py").write_text("")
    return tmp_path


def started_by(monkeypatch: pytest.MonkeyPatch, num_ranks: int | None) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if num_ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))


def test_a_rank_becomes_megatron_lms_own_script(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started_by(monkeypatch, 8)
    replaced: list[list[str]] = []
    monkeypatch.setattr(pretrain, "start", replaced.append)
    options = [f"--megatron-lm={checkout}", "--data-path", "0.5", "a", "0.5", "b"]
    assert launch.main([*BIG, *options, "--", "--lr", "1e-5"]) == 0
    ((python, *words),) = replaced
    assert python == sys.executable
    script = str(checkout / "pretrain_gpt.py")
    assert words[:3] == ["-m", "uccl_ep_train.megatron.launch", script]
    assert words[words.index("--data-path") :] == ["--data-path", "0.5", "a", "0.5", "b", "--lr", "1e-5"]
    assert words.index("--lr") < words.index("--data-path"), "the recipe's own comes first"


@pytest.mark.parametrize(
    ("num_ranks", "options", "words"),
    [
        (8, [], "give its checkout, --megatron-lm PATH"),
        (8, ["--megatron-lm=nowhere"], "nowhere: no pretrain_gpt.py there"),
        (
            None,
            ["CHECKOUT", "--data-path=a"],
            "needs 8 ranks here, and was not started by torchrun: torchrun",
        ),
        (4, ["CHECKOUT", "--data-path=a"], "needs 8 ranks here, and torchrun started 4"),
        (8, ["CHECKOUT"], "no data: give --data-path"),
        (
            8,
            ["CHECKOUT", "--token-dispatcher=flex-deepep", "--", "--mock-data"],
            "deep_ep cannot be imported",
        ),
    ],
)
def test_what_is_missing_is_said_before_megatron_starts(
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_ranks: int | None,
    options: list[str],
    words: str,
) -> None:
    started_by(monkeypatch, num_ranks)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    monkeypatch.setattr(pretrain, "start", lambda _words: pytest.fail("it started"))
    given = [f"--megatron-lm={checkout}" if option == "CHECKOUT" else option for option in options]
    assert launch.main([*BIG, *given]) == 2
    assert words in capsys.readouterr().err


TRIAL = ["--trial=3", "--num-ranks=2"]


@pytest.mark.parametrize("name", PRETRAININGS)
def test_a_trial_changes_neither_the_layers_nor_how_they_are_computed(name: str) -> None:
    whole, trial = (chosen_job(parse_args([f"--recipe={name}", *more])).arguments for more in ([], TRIAL))
    changed = {key for key in whole | trial if whole.get(key) != trial.get(key)}
    depth = {
        "num_layers",
        "moe_layer_freq",
        "pipeline_model_parallel_size",
        "decoder_last_pipeline_num_layers",
    }
    steps = {
        "global_batch_size",
        "train_iters",
        "lr_warmup_iters",
        "eval_iters",
        "log_interval",
        "log_throughput",
    }
    data = {"tokenizer_type", "tokenizer_model", "vocab_size", "mock_data", "split"}
    assert changed <= depth | steps | data | {"expert_model_parallel_size"}
    assert (trial["num_layers"], trial["expert_model_parallel_size"], trial["train_iters"]) == (3, 2, 10)
    assert trial["global_batch_size"] == 2 * 2 * trial["micro_batch_size"]
    if whole.get("moe_layer_freq"):
        assert trial["moe_layer_freq"] == [0, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trial=0", "--num-ranks=2"], "trial = 0: allowed are 1 .. 48 layers"),
        (["--trial=49", "--num-ranks=2"], "trial = 49: allowed are 1 .. 48 layers"),
        (["--recipe=deepseek_v3", "--trial=1", "--num-ranks=2"], "trial = 1: allowed are 2 .. 61 layers"),
        (["--trial=3", "--num-ranks=3"], "num_ranks = 3: in a trial all ranks share the 128 experts"),
        (["--trial=3", "--num-ranks=0"], "num_ranks = 0: in a trial"),
        (["--trial=3"], "torch sees none; for a dry run give --num-ranks"),
        (TRIAL, "a trial needs GPUs: 2 ranks need a GPU each, and torch sees 0"),
    ],
)
def test_a_trial_that_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    started_by(monkeypatch, None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks started"))
    assert launch.main([*BIG, *options]) == 2
    assert words in capsys.readouterr().err


def test_a_trial_starts_a_rank_for_each_gpu(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started_by(monkeypatch, None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("uccl_ep_train.core.cuda.built", lambda: True)
    started: list[tuple[int, list[str]]] = []

    def run_ranks(num_ranks: int, argv: list[str]) -> int:
        started.append((num_ranks, argv))
        return 0

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    argv = [*BIG, "--trial=3", f"--megatron-lm={checkout}", "--", "--seed", "3"]
    assert launch.main([*BIG, "--trial=3"]) == 2 and "give its checkout" in capsys.readouterr().err
    assert launch.main(argv) == 0 and started == [(4, argv)]
    # And a rank that was started so:
    started_by(monkeypatch, 4)
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    replaced: list[list[str]] = []
    monkeypatch.setattr(pretrain, "start", replaced.append)
    assert launch.main(argv) == 0
    (words,) = replaced
    assert "--mock-data" in words and words[-2:] == ["--seed", "3"]
    assert words[words.index("--expert-model-parallel-size") + 1] == "4"


@pytest.mark.parametrize("there", [False, True])
def test_without_apex_gradients_are_added_up_without_its_kernel(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    started_by(monkeypatch, 8)
    find_spec = importlib.util.find_spec
    apex = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if there else None) if name == apex else find_spec(name),
    )
    words = pretrain.command(chosen_job(parse_args(BIG)), checkout, ["a"], [])
    assert ("--no-gradient-accumulation-fusion" in words) == (not there)


@pytest.mark.parametrize("name", PRETRAININGS)
def test_megatron_lm_is_told_when_to_evaluate(name: str) -> None:
    """It divides by this number, for which it has no default."""
    assert chosen_job(parse_args([f"--recipe={name}"])).arguments["eval_interval"] > 0


def test_a_flex_dispatcher_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = SimpleNamespace(Buffer=object)
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    jobs.check_package("flex-deepep")
    with pytest.raises(RecipeError, match="deep_ep has no HybridEPBuffer"):
        jobs.check_package("flex-hybridep")
    for other in ("uccl_ep", "alltoall", "allgather"):
        jobs.check_package(other)


@pytest.mark.parametrize("options", [["--token-dispatcher=flex-deepep"], ["--compare=flex-deepep"]])
def test_flex_dispatchers_of_tiny_host_are_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks started"))
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert launch.main(["--device=cpu", *options]) == 2
    assert "deep_ep cannot be imported" in capsys.readouterr().err
    package: Any = SimpleNamespace(Buffer=object)
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    assert launch.main(["--device=cpu", *options]) == 2
    assert "it needs GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--hardware=h200"],
        ["--trial=0"],
        ["--recipe=tiny_host", "--ep=2"],
        ["--recipe=kimi_k2", "--domain-size=8"],
        ["--picture=a.png"],
        ["--", "--lr", "1"],
        ["--recipe=kimi_k2", "--ablate=zero_experts"],
        ["--recipe=kimi_k2", "--resume"],
        ["--recipe=kimi_k2", "--stop-at=0"],
    ],
)
def test_options_of_the_other_kind_of_recipe_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that they were given by."""
    with pytest.raises(SystemExit):
        parse_args(options)
    said = capsys.readouterr().err.splitlines()[-1]
    assert ("`--`" if options[0] == "--" else options[-1].split("=")[0]) in said
