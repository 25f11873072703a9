"""Command-line tools refuse wrong arguments in one line with status 2, before they do anything.

So they do with output that cannot be written; what a terminal cannot show is no error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes import RECIPES, launch, quality
from recipes.plan import devices, jobs
from uccl_ep_train.api import trace
from uccl_ep_train.common.command_line import READER_LEFT
from uccl_ep_train.deep_ep import __main__ as deep_ep
from uccl_ep_train.megatron import launch as megatron
from uccl_ep_train.planner import __main__ as planner
from uccl_ep_train.planner import fit
from uccl_ep_train.settings import env
from uccl_ep_train.tools import c_interface, calibrate
from uccl_ep_train.tools.doctor import __main__ as doctor

ROOT = Path(__file__).resolve().parents[2]
HUGE = "9" * 5000

Said = tuple[int, str]
Tool = Callable[..., object]


def status_of(tool: Tool, words: list[str], capsys: pytest.CaptureFixture[str]) -> Said:
    """Exit status of a tool's main function, and what it says."""
    try:
        status = tool(words)
    except SystemExit as end:
        status = end.code
    assert isinstance(status, int)
    return status, capsys.readouterr().err


def refused(tool: Tool, words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = status_of(tool, words, capsys)
    assert status == 2 and text in said, (words, status, said)
    assert text in said.splitlines()[-1], said  # argparse says the usage before


SWEEP = ["--sweep", "--ep", "8"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--sweep", "--ep", "0"], "argument --ep: '0': allowed is 1 .. 2048"),
        (["--sweep", "--ep", "-8"], "argument --ep: '-8': allowed is"),
        (["--sweep", "--ep", "4096"], "allowed is 1 .. 2048"),
        (["--sweep", "--ep", HUGE], "argument --ep: '999"),
        (["--sweep", "--ep", "24"], "no group of the sweep can be laid out"),
        ([*SWEEP, "--domain-size", "-1"], "argument --domain-size: '-1': allowed is"),
        ([*SWEEP, "--experts", "0"], "argument --experts: '0'"),
        ([*SWEEP, "--topk", "33"], "argument --topk: '33': allowed is 1 .. 32"),
        ([*SWEEP, "--tokens", "100000000000"], "argument --tokens: '100000000000': allowed is 1 .. 65536"),
        ([*SWEEP, "--hidden", "100000000000"], "allowed is a multiple of 32, 32 .. 131072"),
        ([*SWEEP, "--hidden", "33"], "allowed is a multiple of 32"),
        ([*SWEEP, "--groups", "0"], "argument --groups: '0': allowed is at least 1"),
        ([*SWEEP, "--groups", "8", "--group-topk", "0"], "argument --group-topk: '0'"),
        ([*SWEEP, "--budget-mib", "0"], "argument --budget-mib: '0'"),
        ([*SWEEP, "--picture", "noext"], "'noext': allowed is a name that ends in .png"),
        ([*SWEEP, "--picture", "x.foo"], "'x.foo': allowed is a name that ends in .png"),
        ([*SWEEP, "--picture", "/nope/x.png"], "/nope is no folder"),
        (["--trace", "x.json", "--picture", "x.png"], "--picture is for --sweep"),
    ],
)
def test_the_planner_refuses(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(planner.main, words, text, capsys)


def test_the_planner_takes_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """Control."""
    assert status_of(planner.main, [*SWEEP, "--groups", "8", "--group-topk", "4"], capsys)[0] == 0


NO_TRACES = {
    "empty": "",
    "binary": "\x00\x01",
    "deep": "[" * 200_000,
    "list": "[1, 2]",
    "number": '{"traceEvents": 5, "otherData": {"rank": 0, "host": "h", "lost_events": 0}}',
    "null": '{"traceEvents": null, "otherData": {"rank": 0, "host": "h", "lost_events": 0}}',
    "numbers": '{"traceEvents": [1, 2], "otherData": {"rank": 0, "host": "h", "lost_events": 0}}',
    "other": '{"traceEvents": [{"name": "x"}], "otherData": {"rank": 0, "host": "h", "lost_events": 0}}',
}


@pytest.mark.parametrize("name", NO_TRACES)
def test_what_is_no_trace_is_refused_by_both_tools(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(NO_TRACES[name])
    status, said = status_of(trace._main, [str(tmp_path / "out.json"), str(path)], capsys)
    assert status == 1 and f"{path} is no trace" in said
    status, said = status_of(planner.main, ["--trace", str(path)], capsys)
    assert status == 2 and f"{path} is no trace" in said


def test_a_trace_of_no_rank_is_not_merged_and_one_of_a_rank_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("out.json", "part.json")]
    document = {"traceEvents": [], "otherData": {"rank": 0, "host": ["h"], "lost_events": 0}}
    (tmp_path / "part.json").write_text(json.dumps(document))
    status, said = status_of(trace._main, paths, capsys)
    assert status == 1 and "is no trace of one rank" in said
    document["otherData"] = {"rank": 0, "host": "h", "lost_events": 0}
    (tmp_path / "part.json").write_text(json.dumps(document))
    assert status_of(trace._main, paths, capsys)[0] == 0
    for words, expected in (["--help"], 0), (["/nope/out.json", paths[1]], 2), ([paths[0]], 2):
        assert status_of(trace._main, words, capsys)[0] == expected


@pytest.mark.parametrize("words", ["a b", "b a b"])
def test_a_rank_s_trace_is_not_overwritten_by_the_merged_one(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, name in enumerate("ab"):
        about = {"rank": rank, "host": "h", "lost_events": 0}
        (tmp_path / name).write_text(json.dumps({"traceEvents": [], "otherData": about}))
    before = [(tmp_path / name).read_text() for name in "ab"]
    paths = [str(tmp_path / word) for word in words.split()]
    status, said = status_of(trace._main, paths, capsys)
    assert status == 1 and f"out: {paths[0]} is the trace of a rank; allowed is another file" in said
    assert [(tmp_path / name).read_text() for name in "ab"] == before
    merge = [str(tmp_path / "out.json"), *paths[1:]]
    assert [status_of(trace._main, merge, capsys)[0] for _ in range(2)] == [0, 0]  # it may be written again


def test_events_that_give_no_rates_are_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"name": "q", "ph": "X", "pid": 0, "tid": 7, "args": {}}
    (tmp_path / "x.json").write_text(json.dumps({"traceEvents": [event]}))
    status, said = status_of(planner.main, ["--trace", str(tmp_path / "x.json")], capsys)
    assert status == 2 and "of no trace of Buffer.trace" in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--restart", "--resume"], "--restart with --resume: allowed is one of them"),
        (["--start-from=x", "--resume"], "--start-from with --resume"),
        (["--router-trace=x.npz", "--compare=alltoall"], "--router-trace with --compare"),
        (["--recipe=kimi_k2", "--trial=4", "--data-path=x"], "--trial with --data-path"),
        (["--router-trace=x"], "'x': allowed is a name that ends in .npz"),
        (["--steps=-4", "--dry-run"], "argument --steps: '-4': allowed is at least 1"),
        (["--steps=0"], "argument --steps: '0': allowed is at least 1"),
        (["--recipe=deepseek_v3", "--dry-run", "--steps=-4"], "argument --steps: '-4'"),
        (["--seed=-4", "--dry-run"], "argument --seed: '-4': allowed is 0 .. 2147483647"),
        (["--dry-run", "--picture=/nope/x.png"], "/nope is no folder"),
        (["--dry-run", "--picture=noext"], "'noext': allowed is a name that ends in .png"),
        (["--run-dir=FILE"], "it cannot be made (File exists)"),
        (["--run-dir=FILE/below"], "it cannot be made (Not a directory)"),
        (["--start-from=RUN", "--run-dir=RUN"], "allowed is another run's folder than --run-dir"),
    ],
)
def test_the_launcher_refuses_before_ranks_start(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks started"))
    (tmp_path / "file").write_text("")
    known = {"FILE": tmp_path / "file", "RUN": tmp_path / "run"}
    for name, path in known.items():
        words = [word.replace(name, str(path)) for word in words]
    refused(launch.main, words, text, capsys)


BIG = "--recipe=qwen3_30b_a3b"


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--stop-at=0"], "stop_at = 0: allowed is 1 .. "),
        (["--start-from=/nope"], "--start-from: no checkpoint in /nope/checkpoints"),
        (["--resume", "--run-dir=/nope"], "--resume: no checkpoint in /nope"),
        (["--run-dir=/dev/null/x"], "--run-dir /dev/null/x: it cannot be made"),
        ([BIG, "--megatron-lm=/nope"], "--megatron-lm /nope: no pretrain_gpt.py there"),
        (
            ["--token-dispatcher=alltoall", "--dispatch-dtype=fp8"],
            "--dispatch-dtype fp8 with token_dispatcher",
        ),
        (["--token-dispatcher=alltoall", "--grad-dtype=fp8"], "--grad-dtype fp8 with token_dispatcher"),
        (
            [BIG, "--token-dispatcher=flex-deepep", "--dispatch-dtype=bf16"],
            "= flex-deepep: it is for uccl_ep",
        ),
        ([BIG, "--hardware=mi300x", "--dispatch-dtype=bf16"], "= alltoall: it is for uccl_ep"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(
    dry: list[str],
    words: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks started"))
    monkeypatch.setattr(jobs, "check_package", lambda _: None)
    refused(launch.main, [*words, *dry], text, capsys)


def test_options_of_uccl_ep_are_for_either_run_of_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: 7)
    words = [f"--run-dir={tmp_path}", "--device=cpu", "--dispatch-dtype=bf16"]
    for ours in (["--compare=alltoall"], ["--token-dispatcher=alltoall", "--compare=uccl_ep"]):
        assert launch.main([*words, *ours]) == 7, capsys.readouterr().err
    other = ["--token-dispatcher=alltoall", "--domain-size=2"]
    refused(launch.main, [*words[:2], *other], "--domain-size 2 with token_dispatcher = alltoall", capsys)


def test_a_rank_that_torchrun_started_checks_what_the_launcher_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "train_rank", lambda *_: 7)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    folder = f"--run-dir={tmp_path}"
    refused(launch.main, [folder, "--resume"], f"--resume: no checkpoint in {tmp_path}", capsys)
    refused(launch.main, [folder, "--compare=alltoall"], "--compare: under torchrun", capsys)
    assert launch.main([folder]) == 7, "control"


def test_a_picture_of_what_has_no_planned_times_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dry-run", f"--picture={tmp_path / 'x.png'}"]
    refused(launch.main, words, "tiny_host by uccl_ep has no planned times", capsys)
    refused(launch.main, [BIG, "--token-dispatcher=alltoall", *words], "by alltoall has no planned", capsys)


def test_checkpoints_survive_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tmp_path / "checkpoints" / "step_000001"
    step.mkdir(parents=True)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks started"))
    with pytest.raises(SystemExit):
        launch.main([f"--run-dir={tmp_path}", "--restart", "--resume"])
    assert step.is_dir()
    (step / "recipe.json").write_text("{")
    assert launch.main([f"--run-dir={tmp_path}"]) == 2, "settings that cannot be read"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seeds", "1", "-2"], "argument --seeds: '-2'"),
        (["--steps", "0"], "argument --steps: '0'"),
        (["--steps", "9", "--branch-at", "9"], "--branch-at 9: allowed is 1 .. 8"),
    ],
)
def test_the_comparison_refuses(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(quality.parse_args, words, text, capsys)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tokens", "0"], "argument --tokens: '0': allowed is 1 .. 65536"),
        (["--hidden", "33"], "argument --hidden: '33'"),
        (["--topk", "9", "--experts", "8"], "--topk 9: allowed is 1 .. 8"),
        (["--rounds", "0"], "argument --rounds: '0'"),
        (["--experts", "9"], "--experts 9: allowed is a multiple of the 2 ranks"),
        ([], "UCCL_EP_WINDOWS_FILE = "),
    ],
)
def test_the_calibration_refuses_before_ranks_meet(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    (tmp_path / "plain").write_text("")
    file = {"UCCL_EP_WINDOWS_FILE": str(tmp_path / "plain" / "windows.json")}
    for name, value in (ranks | file).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(calibrate, "_group", lambda: pytest.fail("ranks meet"))
    refused(calibrate.main, words, text, capsys)
    for name, value in (("WORLD_SIZE", HUGE), ("RANK", "2"), ("LOCAL_RANK", "x"), ("MASTER_PORT", "99999")):
        with monkeypatch.context() as other:
            other.setenv(name, value)
            refused(calibrate.main, [], f"environment variable {name} = '{value[:40]}", capsys)
    monkeypatch.delenv("WORLD_SIZE")
    refused(calibrate.main, [], "WORLD_SIZE = '': allowed is a rank of torchrun", capsys)


@pytest.mark.parametrize("value", ["x", "-1", HUGE])
def test_a_recipe_refuses_what_no_launcher_sets(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--recipe", "tiny_host", "--dry-run"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    refused(launch.main, words, "environment variable LOCAL_WORLD_SIZE = ", capsys)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    empty = devices.place(RECIPES["tiny_host"]())
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert empty == devices.place(RECIPES["tiny_host"]())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--timeout", "inf"], "argument --timeout: 'inf': allowed is more than 0, at most 1e+06"),
        (["--timeout", "nan"], "argument --timeout: 'nan'"),
        (["--experts", "100000000000"], "argument --experts"),
        (["--hidden", "4294967296"], "argument --hidden"),
        (["--group-size", "0"], "argument --group-size: '0'"),
    ],
)
def test_the_doctor_refuses(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(doctor.parse, words, text, capsys)


@pytest.mark.parametrize(
    ("tool", "words", "text"),
    [
        (env._main, ["--bogus"], "unrecognized arguments: --bogus"),
        (env._main, ["x", "y"], "unrecognized arguments: x y"),
        (c_interface.main, ["x"], "unrecognized arguments: x"),
        (deep_ep.main, ["/nope.py"], "SCRIPT /nope.py: allowed is a file with a program in Python"),
        (deep_ep.main, ["/"], "SCRIPT /: allowed is a file with a program in Python"),
        (megatron.main, ["/nope.py"], "SCRIPT /nope.py: allowed is a file with a program in Python"),
    ],
)
def test_small_tools_refuse(
    tool: Tool,
    words: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *words])
    refused(tool if tool is megatron.main else lambda _: tool(), words, text, capsys)


PLANNER = ("uccl_ep_train.planner", *SWEEP)
VARIABLES = ("uccl_ep_train.env",)


def started(words: tuple[str, ...], stdout: int, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | more,
    )


@pytest.mark.parametrize("words", [PLANNER, VARIABLES])
def test_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        process = started(words, full.fileno())
    _, said = process.communicate(timeout=100)
    assert said == "the output cannot be written: No space left on device\n" and process.returncode == 1


@pytest.mark.parametrize("words", [PLANNER, VARIABLES])
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    process = started(words, writer)
    os.close(reader)
    os.close(writer)
    _, said = process.communicate(timeout=100)
    assert (said, process.returncode) == ("", READER_LEFT)


def test_a_terminal_without_letters_gets_question_marks() -> None:
    process = started(PLANNER, subprocess.PIPE, PYTHONIOENCODING="ascii")
    out, said = process.communicate(timeout=100)
    assert process.returncode == 0 and "dispatch ?s" in out, said


def test_a_fit_without_kernels_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("uccl_ep_train.core.cuda.built", lambda: False)
    fit._protocol.cache_clear()
    refused(planner.main, ["--fit", str(ROOT / "bench")], "was built without CUDA kernels", capsys)
