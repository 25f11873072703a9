"""bench/recipe_trials.py reads what Megatron-LM prints. The lines are Megatron-LM 0.19's, from two GPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import recipe_trials
from bench.recipe_trials import TrialError, steps_of

MEMORY_LINE = (
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 20146.85 | max allocated: 25197.18 | reserved: "
    "27200.00 | max reserved: 27200.00\n"
)


def printed(*step_ms: float) -> str:
    lines = [
        f" [2026-11-23 02:00:00.000000] iteration {n:8}/ 10 | consumed samples: 8 | elapsed time per "
        f"iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 181.7 | learning rate: 4.2E-05 | "
        f"global batch size: 8 | lm loss: {n}.5E+00 | loss scale: 1.0 | grad norm: 3.245 |\n"
        for n, ms in enumerate(step_ms, 1)
    ]
    return "".join([*lines[:2], MEMORY_LINE, *lines[2:]])


def test_the_first_steps_are_not_counted() -> None:
    found = steps_of(printed(21515.5, 10889.1, 267.1, 250.8, 230.0, 240.0, 250.0))
    assert (found["runs"], found["median_us"], found["p10_us"]) == (3, 240000.0, 232000.0)
    assert found["losses"] == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]
    assert found["peak_memory_bytes"] == round(25197.18 * 2**20)


def test_a_run_that_printed_too_few_steps_is_an_error() -> None:
    with pytest.raises(TrialError, match="4 steps were printed; more than 4"):
        steps_of(printed(1.0, 2.0, 3.0, 4.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trials", "qwen3:4"], "--trials qwen3:4: allowed is RECIPE:LAYERS"),
        (["--trials", "mixtral_8x7b"], "--trials mixtral_8x7b: allowed is RECIPE:LAYERS"),
        (["--steps", "4"], "argument --steps: '4': allowed is at least 5"),
        (["--dispatchers", "deepep"], "invalid choice: 'deepep'"),
    ],
)
def test_bad_options_end_at_the_command_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pretrain_gpt.py").write_text("")
    with pytest.raises(SystemExit):
        recipe_trials.main([f"--megatron-lm={tmp_path}", *options])
    assert words in capsys.readouterr().err


def test_a_job_that_fails_is_recorded_with_its_last_words_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        if "--token-dispatcher=uccl_ep" in command:
            return SimpleNamespace(returncode=1, stdout="ArrivalTimeout: rank 1\n")
        return SimpleNamespace(returncode=0, stdout=printed(9.0, 8.0, 7.0, 6.0, 5.0))

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "found"
    (tmp_path / "pretrain_gpt.py").write_text("")
    argv = [f"--megatron-lm={tmp_path}", "--trials", "mixtral_8x7b:3", "--num-ranks=2", f"--out={out}"]
    assert recipe_trials.main([*argv, "--commit=abc", "--", "--seed", "3"]) == 1
    failed, finished = json.loads(out.with_suffix(".json").read_text())
    assert failed["not_run"] == "ArrivalTimeout: rank 1" and failed["median_us"] is None
    assert (finished["system"], finished["median_us"], finished["commit"]) == ("alltoall", 5000.0, "abc")
    assert all(command[-3:] == ["--", "--seed", "3"] and "--trial=3" in command for command in commands)
    assert "alltoall: 5.0 ms a step" in capsys.readouterr().out
