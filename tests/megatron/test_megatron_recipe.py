"""The recipe end to end: metrics, curve, proof, stop and resume. What needs no ranks is not slow."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from recipes import RECIPES
from recipes.launch import chosen_recipe, default_run_dir, main, parse_args
from recipes.measure.metrics import Reporter, StepMetrics, read_metrics
from recipes.measure.plot import plot_losses
from recipes.measure.proof import Crossing, ProofError, check, expected_dispatch_bytes
from recipes.plan import devices
from recipes.training.checkpoint import CheckpointError, Checkpoints, settings_of
from recipes.training.loop import Outcome, Validated
from tests.megatron.harness import MegatronRanks

ROOT = Path(__file__).resolve().parents[2]
SETTINGS_AT_FIRST = {
    "name", "num_ranks", "domain_size", "threads_per_rank", "num_layers", "hidden_size", "num_heads",
    "expert_ffn_size", "num_experts", "topk", "aux_loss_coeff", "sequence_length", "micro_batch_size",
    "num_microbatches", "num_steps", "lr", "min_lr", "warmup_steps", "adam_beta2", "weight_decay",
    "clip_grad", "seed", "token_dispatcher", "dispatch_dtype", "grad_dtype", "budget_bytes", "ablate",
    "val_interval", "val_batches", "checkpoint_interval", "val_fraction",
}  # fmt: skip
STEPS = RECIPES["tiny_host"]().num_steps
STEP_KEYS = ["step", "train_loss", "val_loss", "tokens_per_s", "dispatch_ms", "combine_ms", "dispatcher"]


def a_step(step: int, val_loss: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        train_loss=5.0 / step,
        val_loss=val_loss,
        tokens_per_s=1e3,
        dispatch_ms=1.0,
        combine_ms=2.0,
        dispatcher="alltoall",
    )


def test_metrics_have_one_object_a_step_with_the_stated_keys() -> None:
    assert list(asdict(a_step(1))) == STEP_KEYS


def test_a_resumed_run_drops_the_steps_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reporter = Reporter(path, num_steps=4, first_step=0, label="test")
    for step in (1, 2, 3):
        reporter.step(a_step(step, val_loss=2.0 if step == 2 else None), step_ms=10.0)
    reporter.close()
    path.write_text(path.read_text() + '{"step": 4, "train_l')  # cut short by a crash
    reporter = Reporter(path, num_steps=4, first_step=2, label="test")
    reporter.step(a_step(3), step_ms=10.0)
    reporter.close()
    assert [m.step for m in read_metrics(path)] == [1, 2, 3]
    assert [m.val_loss for m in read_metrics(path)] == [None, 2.0, None]


@pytest.mark.parametrize(("first_step", "left_s"), [(0, 160), (10, 160)])
def test_progress_says_how_long_the_steps_left_take(
    first_step: int, left_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By the steps of this run alone: a resumed one has not made those before its checkpoint."""
    now = [100.0]
    monkeypatch.setattr("recipes.measure.metrics.time.monotonic", lambda: now[0])
    reporter = Reporter(tmp_path / "metrics.jsonl", num_steps=100, first_step=first_step, label="test")
    now[0] += 60.0  # for the validation before the first step
    for step in range(first_step + 1, 21):
        now[0] += 2.0
        reporter.step(a_step(step), step_ms=2000.0)
    reporter.close()
    assert f"step 20 of 100, loss 0.250, 1.0k tokens/s, dispatch+combine 0%, about {left_s} s left" in (
        capsys.readouterr().err
    )


def test_the_curve_is_drawn_from_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(asdict(a_step(s, 2.0 if s == 3 else None))) + "\n" for s in (1, 2, 3)))
    plot_losses([path, tmp_path / "absent.jsonl"], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_options_override_the_recipe_and_nothing_else() -> None:
    recipe = RECIPES["tiny_host"]()
    assert chosen_recipe(parse_args([]), None) == recipe
    changed = chosen_recipe(
        parse_args(["--steps", "7", "--seed", "1", "--dispatch-dtype", "bf16"]), "allgather"
    )
    assert (changed.num_steps, changed.seed, changed.dispatch_dtype) == (7, 1, "bf16")
    assert changed.token_dispatcher == "allgather"
    assert changed.model == recipe.model


def test_the_recipe_is_what_the_project_promises() -> None:
    recipe = RECIPES["tiny_host"]()
    assert (recipe.num_ranks, recipe.domain_size) == (4, 2)
    assert (recipe.model.num_experts, recipe.model.topk) == (8, 2)
    assert recipe.model.hidden_size % 128 == 0
    assert recipe.token_dispatcher == "uccl_ep" and recipe.dispatch_dtype == "fp8"


def test_resume_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.launch", "--resume", f"--run-dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no checkpoint" in done.stderr


@pytest.mark.parametrize(("options", "said"), [
    (["--stop-at=0"], f"stop_at = 0: allowed is 1 .. {STEPS}"),
    ([f"--stop-at={STEPS + 1}"], f"stop_at = {STEPS + 1}: allowed is 1 .. {STEPS}"),
    (["--start-from=nowhere"], "--start-from: no checkpoint in nowhere/checkpoints"),
])  # fmt: skip
def test_where_a_run_begins_and_stops_is_checked_before_ranks_start(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--run-dir={tmp_path}", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPES["tiny_host"](), device="cpu")
    folder = tmp_path / "checkpoints" / "step_000005"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(settings_of(recipe)))
    (tmp_path / "checkpoints" / "step_000009.part").mkdir()  # a save that was cut short does not count
    checkpoints = Checkpoints(tmp_path / "checkpoints", recipe)
    assert checkpoints.steps() == [5]
    checkpoints.check()
    dataclasses.replace(checkpoints, recipe=dataclasses.replace(recipe, budget_bytes=1 << 28)).check()
    for change in (
        {"num_steps": 7}, {"dispatch_dtype": "bf16"}, {"token_dispatcher": "alltoall"}, {"device": "cuda"},
    ):  # fmt: skip
        other = dataclasses.replace(checkpoints, recipe=dataclasses.replace(recipe, **change))
        with pytest.raises(CheckpointError, match=next(iter(change))):
            other.check()
        going_on = dataclasses.replace(other, of_another=True)  # free is the dispatcher, and nothing else
        if next(iter(change)) in ("dispatch_dtype", "token_dispatcher"):
            going_on.check()
        else:
            with pytest.raises(CheckpointError, match=next(iter(change))):
                going_on.check()
    # Such a checkpoint is of the CPU, and of a model that had no other settings.
    older = {name: value for name, value in settings_of(recipe).items() if name in SETTINGS_AT_FIRST}
    (folder / "recipe.json").write_text(json.dumps(older))
    checkpoints.check()
    with pytest.raises(CheckpointError, match="device"):
        other.check()


@pytest.mark.parametrize("option", ["--run-dir", "--start-from"])
@pytest.mark.parametrize(("left", "why"), [(None, "there is none"), (300, "it is not whole")])
def test_a_checkpoint_without_a_whole_file_of_each_rank_is_refused_before_ranks_start(
    option: str, left: int | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a copy that was cut short leaves it."""
    argv = ["--recipe=tiny_host", "--device=cpu", f"{option}={tmp_path / 'a'}"]
    if option == "--start-from":
        argv.append(f"--run-dir={tmp_path / 'b'}")
    recipe = dataclasses.replace(chosen_recipe(parse_args(argv), None), device="cpu")
    folder = tmp_path / "a" / "checkpoints" / "step_000005"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(settings_of(recipe)))
    for rank in range(recipe.num_ranks):
        torch.save(torch.zeros(99), folder / f"rank_{rank}.pt")
    checkpoints = Checkpoints(tmp_path / "a" / "checkpoints", recipe)
    checkpoints.check_files()
    broken = folder / "rank_2.pt"
    broken.unlink() if left is None else broken.write_bytes(broken.read_bytes()[:left])
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert f"rank_2.pt: {why}; allowed is a file of each of the run's ranks" in said


def test_other_dispatchers_and_ablations_have_their_own_run_directory() -> None:
    folders = {
        str(default_run_dir(chosen_recipe(parse_args(arguments), dispatcher)))
        for arguments, dispatcher in (
            ([], None),
            ([], "uccl_ep"),
            ([], "alltoall"),
            (["--ablate", "zero_experts"], None),
        )
    }
    assert folders == {"runs/tiny_host", "runs/tiny_host-alltoall", "runs/tiny_host-zero_experts"}


def test_the_scale_error_halves_rows_and_leaves_their_gradient(ranks: MegatronRanks) -> None:
    halved, gradient = ranks.run("ablation_case.rows_and_gradient", ablate="wrong_scale")[0]
    assert (halved, gradient) == ([0.5, 1.0, 1.5], [1.0, 1.0, 1.0])
    untouched, gradient = ranks.run("ablation_case.rows_and_gradient", ablate="none")[0]
    assert (untouched, gradient) == ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])


def crossing(**changes: int) -> Crossing:
    values = {
        "layer": 1, "rank": 0, "domain": 1, "dispatch_bytes": 148, "expected_dispatch_bytes": 148,
        "combine_bytes": 256, "expected_combine_bytes": 256,
    }  # fmt: skip
    return Crossing(**(values | changes))


def test_the_proof_of_crossing_accepts_a_layer_whose_tokens_all_want_one_domain() -> None:
    """The router of a layer may agree on one domain; the other one then sends no row and relays no sum."""
    nothing_back = crossing(layer=2, combine_bytes=0, expected_combine_bytes=0)
    nothing_sent = crossing(layer=2, dispatch_bytes=0, expected_dispatch_bytes=0)
    check([crossing(), nothing_back, nothing_sent])


@pytest.mark.parametrize(("device", "dtype", "num_bytes"), [
    ("cpu", "fp8", 2 * (128 + 16) + 4 * 3), ("cpu", "bf16", 2 * 256 + 4 * 3),
    ("cuda", "fp8", 2 * 256), ("cuda", "bf16", 2 * 256),
])  # fmt: skip
def test_bytes_that_have_to_cross(
    device: str, dtype: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens, two of them with experts in a domain: one has two there."""
    monkeypatch.setattr(devices, "own", lambda: torch.device(device))
    recipe = dataclasses.replace(RECIPES["tiny_host"](), dispatch_dtype=dtype)
    assert recipe.model.hidden_size == 128
    wanted_TE = torch.tensor([[True, True], [False, False], [False, True]])
    assert expected_dispatch_bytes(wanted_TE, recipe) == num_bytes


@pytest.mark.parametrize("lost", ["dispatch_bytes", "combine_bytes"])
def test_the_proof_of_crossing_notices_what_did_not_cross(lost: str) -> None:
    for num_bytes in (0, 147, 512):
        with pytest.raises(ProofError, match=f"layer=2.*{lost}={num_bytes}"):
            check([crossing(), crossing(**{"layer": 2, lost: num_bytes})])
    with pytest.raises(ProofError, match=r"no layer.*rank 3 go to domain 0"):
        check([crossing(), crossing(rank=3, domain=0, dispatch_bytes=0, expected_dispatch_bytes=0)])


def test_a_run_says_of_which_step_its_validation_is() -> None:
    """As one that was stopped between two validations, or before it made one."""
    validated = Validated(5, 1.5)
    assert str(Outcome(True, 5, validated, 3.2)) == (
        "finished at step 5, validation loss 1.5000 nats per byte, 3 s"
    )
    stopped = "stopped, the same command resumes it, at step 7"
    assert str(Outcome(False, 7, validated, 3.2)) == (
        f"{stopped}, validation loss 1.5000 nats per byte at step 5, 3 s"
    )
    assert str(Outcome(False, 7, None, 3.2)) == f"{stopped}, no validation, 3 s"


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> list[str]:
    """The launcher's options for a device; on GPUs with two ranks where there are no four."""
    if request.param == "cpu":
        return ["--device=cpu"]
    num_ranks = 2 if devices.lacking(4) else 4
    why_not = devices.lacking(num_ranks)
    if why_not:
        pytest.skip(why_not)
    return ["--device=cuda", f"--num-ranks={num_ranks}"]


def launch(run_dir: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "recipes.launch", "--steps=8", f"--run-dir={run_dir}", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses(run_dir: Path) -> list[tuple[int, float, float | None]]:
    return [(m.step, m.train_loss, m.val_loss) for m in read_metrics(run_dir / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stopped_run_resumes_bit_for_bit_and_proves_its_traffic(tmp_path: Path, device: list[str]) -> None:
    """SIGINT after three steps, the same command again, and the same losses as a run that was left alone."""
    on_gpus = "--device=cuda" in device
    num_steps = 300 if on_gpus else 8  # more than a GPU takes before it is told to stop
    num_ranks = next((int(o.split("=")[1]) for o in device if o.startswith("--num-ranks")), 4)
    options = [*device, f"--steps={num_steps}", f"--domain-size={num_ranks // 2}"]
    stopped = launch(tmp_path / "stopped", *options)
    deadline = time.monotonic() + 120
    while len(losses(tmp_path / "stopped")) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    stopped.send_signal(signal.SIGINT)
    said, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 130 and "resumes" in said, said
    before = losses(tmp_path / "stopped")
    assert 3 <= len(before) < num_steps
    said, _ = launch(tmp_path / "stopped", *options).communicate(timeout=150)
    assert f"finished at step {num_steps}" in said, said
    assert said.count(f"rank {num_ranks - 1} to domain 0") == 4, said  # every layer crossed the domains
    assert (tmp_path / "stopped" / "loss.png").exists()
    said, _ = launch(tmp_path / "whole", *options).communicate(timeout=150)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole"), said
    assert losses(tmp_path / "stopped")[: len(before)] == before


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_another_dispatcher(tmp_path: Path) -> None:
    """Half by all-to-all and half by ours has the losses of all-to-all alone; in FP8 (the control) not."""
    options = ["--recipe=paired_host", "--device=cpu"]
    whole, trunk = tmp_path / "whole", tmp_path / "trunk"
    said, _ = launch(whole, *options, "--token-dispatcher=alltoall").communicate(timeout=100)
    assert len(losses(whole)) == 8, said
    said, _ = launch(trunk, *options, "--token-dispatcher=alltoall", "--stop-at=4").communicate(timeout=100)
    assert "stopped" in said and losses(trunk) == losses(whole)[:4], said
    for dtype in ("bf16", "fp8"):
        branch = tmp_path / dtype
        own = [f"--start-from={trunk}", f"--dispatch-dtype={dtype}"]
        said, _ = launch(branch, *options, *own).communicate(timeout=100)
        assert [step for step, *_ in losses(branch)] == [5, 6, 7, 8], said
        assert (losses(branch) == losses(whole)[4:]) == (dtype == "bf16"), said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_bf16_training_of_the_recipe_equals_alltoall_and_each_ablation_does_not(
    tmp_path: Path, device: list[str]
) -> None:
    options = [*device, "--dispatch-dtype=bf16"]
    said, _ = launch(tmp_path / "run", *options, "--compare=alltoall").communicate(timeout=200)
    ours, stock = losses(tmp_path / "run"), losses(tmp_path / "run" / "compare_alltoall")
    assert len(ours) == 8 and ours == stock, said
    for ablation in ("zero_experts", "zero_prob_grad", "wrong_scale"):
        folder = tmp_path / ablation
        said, _ = launch(folder, *options, f"--ablate={ablation}").communicate(timeout=150)
        assert len(losses(folder)) == 8 and losses(folder) != ours, said
