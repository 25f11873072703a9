"""Programs that measure, and scripts, refuse wrong options in one line with status 2, before they begin."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

from bench import (
    bounds,
    command_queue,
    dispatch_combine,
    growth,
    low_latency,
    megatron_step,
    ofi_bandwidth,
    posting_rate,
    proxy_load,
    recipe_trials,
    row_width,
)
from tests.architecture.tree import plant

ROOT = Path(__file__).resolve().parents[2]
BEGINS = {
    dispatch_combine: "start_ranks",
    low_latency: "start_ranks",
    proxy_load: "start_ranks",
    megatron_step: "run_ranks",
    growth: "measured",
    ofi_bandwidth: "build",
    posting_rate: "build",
    recipe_trials: "run",
    row_width: "join_group",
    command_queue: "measure",
}
"""What each program calls first."""


class Begun(Exception):
    """The program has begun."""


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object, **__: object) -> None:
        raise Begun

    for module, name in BEGINS.items():
        monkeypatch.setattr(module, name, begin)
    there = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(command_queue, "torch", there)
    monkeypatch.setattr(command_queue.cuda, "built", lambda: True)


def refused(main: Callable[[list[str]], object], words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what a program says."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


HUGE = "9" * 5000
WHOLE = ("0", "-3", "2.5", "x", "nan", HUGE)
REAL = ("-1", "x", "nan", "inf", "1e9")
OPTIONS = {
    dispatch_combine: "tokens hidden topk experts domains runs ranks",
    low_latency: "tokens hidden topk experts domains runs ranks",
    proxy_load: "tokens hidden domains ranks",
    megatron_step: "num-ranks micro-batch-tokens hidden cell expert-ffn layers experts topk num-microbatches "
    "budget-mib steps warmup",
    growth: "ranks domain-size runs calls one",
    ofi_bandwidth: "size window count turns",
    posting_rate: "seconds",
    recipe_trials: "num-ranks steps",
    row_width: "tokens runs",
}


@pytest.mark.parametrize(
    ("module", "option"),
    [(module, option) for module, options in OPTIONS.items() for option in options.split()],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_numbers_have_bounds(module: ModuleType, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in WHOLE if option != "seconds" else ("0", *REAL):
        said = refused(module.main, [f"--{option}", value], capsys)
        assert f"argument --{option}: {value[:37]!r}"[:-1] in said and ": allowed is" in said


@pytest.mark.parametrize(
    ("module", "option", "values"),
    [
        (dispatch_combine, "num-sms", ("-1", "1025", "x")),
        (dispatch_combine, "stage-sms", ("-1", "1025", "x")),
        (dispatch_combine, "warmup", ("-1", "x")),
        (dispatch_combine, "seed", ("-1", "2147483648")),
        (megatron_step, "seed", ("-1", "2147483648")),
        (low_latency, "sms", ("-1", "257")),
        (low_latency, "tokens", ("4097",)),
        (dispatch_combine, "link-gbytes-per-s", REAL),
        (low_latency, "link-gbytes-per-s", REAL),
        (low_latency, "link-latency-us", REAL),
        (proxy_load, "link-gbytes-per-s", REAL),
        (proxy_load, "hidden", ("33",)),
        (dispatch_combine, "tokens", ("65537",)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_numbers_that_may_be_0_have_bounds(
    module: ModuleType, option: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        assert f"argument --{option}: {value!r}: allowed is" in refused(
            module.main, [f"--{option}", value], capsys
        )


@pytest.mark.parametrize("module", BEGINS, ids=lambda module: module.__name__)
def test_results_that_cannot_be_written_are_known_before(
    module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.json").mkdir()
    for name, said in (
        ("file/x", "is no folder"),
        ("taken", "it is a folder"),
        ("x.json", "a file's name without .json"),
        ("\0", "null byte"),
        ("x" * 300, "File name too long"),
        ("..", "a file's name without"),
    ):
        text = name if name == ".." else str(tmp_path / name)
        answer = refused(module.main, ["--out", text], capsys)
        assert "argument --out: " in answer and said in answer


@pytest.mark.parametrize(
    ("module", "words", "text"),
    [
        (dispatch_combine, ["--systems", "nccl"], "argument --systems: invalid choice: 'nccl'"),
        (dispatch_combine, ["--routing", "trace", "--trace", "/nope.npz"], "--trace /nope.npz is no router"),
        (dispatch_combine, ["--routing", "trace", "--trace", "EMPTY"], "empty is no router trace"),
        (dispatch_combine, ["--routing", "trace", "--trace", "ZIP"], "zip is no router trace"),
        (dispatch_combine, ["--trace", "ZIP"], "without --routing trace; allowed is both"),
        (low_latency, ["--ranks", "2", "--domains", "3"], "--domains 3: allowed is a divisor of the 2 ranks"),
        (low_latency, ["--topk", "9", "--experts", "8"], "--topk 9: allowed is 1 .. 8"),
        (low_latency, ["--tokens", "4096", "--hidden", "131072"], "--hidden 131072: budget_bytes = "),
        (low_latency, ["--experts", "9"], "num_experts = 9"),
        (proxy_load, ["--ranks", "4", "--domains", "3"], "--domains 3: allowed is a divisor of the 4 ranks"),
        (megatron_step, ["--cell", "2"], "--cell 2: allowed are 1 to 1"),
        (megatron_step, ["--steps", "1"], "argument --steps: '1': allowed is 2 .. "),
        (megatron_step, ["--dispatchers", "deepep"], "argument --dispatchers: invalid choice: 'deepep'"),
        (growth, ["--ranks", "16", "20"], "--ranks 20: allowed are multiples of --domain-size 8, from 16 on"),
        (growth, ["--ranks", "8", "16"], "--ranks 8: allowed are multiples"),
        (growth, ["--one", "8"], "--one 8: allowed are multiples"),
        (growth, ["--ranks", "16", "16"], "--ranks 16: allowed are two different numbers"),
        (ofi_bandwidth, ["--size", "1073741824"], "--window 16: allowed is 1 .. 1"),
        (recipe_trials, ["--megatron-lm", "/nope"], "--megatron-lm /nope: allowed is a checkout"),
        (recipe_trials, ["--megatron-lm", "/nope", "--trials", "mixtral_8x7b:0"], "--trials mixtral_8x7b:0"),
        (row_width, [], "WORLD_SIZE = '': allowed are ranks of torchrun"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else None,
)
def test_options_that_do_not_fit_each_other(
    module: ModuleType,
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "zip").write_bytes(b"PK\x03\x04damaged")
    for name in ("empty", "zip"):
        words = [word.replace(name.upper(), str(tmp_path / name)) for word in words]
    assert text in refused(module.main, words, capsys)


def test_what_is_allowed_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control. Under torchrun the number of ranks is torchrun's."""
    (tmp_path / "pretrain_gpt.py").write_text("")
    least = {
        dispatch_combine: "--tokens 1 --hidden 32 --link-gbytes-per-s 0 0.5 --warmup 0 --seed 0 --num-sms 0",
        low_latency: "--tokens 1 4096 --hidden 32 --sms 0 256 --topk 32 --experts 32 --link-latency-us 0",
        proxy_load: "--tokens 65536 --domains 1 --link-gbytes-per-s 0",
        megatron_step: "--steps 2 --warmup 1 --cell 1",
        growth: "--ranks 2 4 --domain-size 1 --runs 1 --calls 1",
        ofi_bandwidth: "--size 1 --window 1 --count 1 --turns 1",
        posting_rate: "--seconds 0.1",
        recipe_trials: f"--megatron-lm {tmp_path} --steps 5 --trials mixtral_8x7b:1",
        command_queue: "",
    }
    for module, words in least.items():
        with pytest.raises(Begun):
            module.main([*words.split(), "--out", str(tmp_path / "x")])
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "divisor of the 3 ranks" in refused(proxy_load.main, ["--ranks", "4"], capsys)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(Begun):
        row_width.main(["--tokens", "1"])


def test_results_have_the_name_that_was_given(tmp_path: Path) -> None:
    """A dot in it is no suffix: two names are two files."""
    parser = bounds.argparse.ArgumentParser()
    bounds.add_output(parser, "found")
    args = parser.parse_args(["--out", str(tmp_path / "h200.v2"), "--commit", "abc"])
    low_latency.report.write_results([{"op": "x"}], args)
    assert [path.name for path in tmp_path.iterdir()] == ["h200.v2.json"]


def unbounded(root: Path) -> list[str]:
    """Options of programs in bench and scripts that take any number."""
    found = []
    for path in sorted([*root.glob("bench/*.py"), *root.glob("scripts/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "type" and isinstance(node.value, ast.Name):
                found += [f"{path.name}: {node.value.id}"] if node.value.id in ("int", "float") else []
    return found


def test_no_option_takes_any_number(tmp_path: Path) -> None:
    assert unbounded(ROOT) == []
    plant(tmp_path, {"bench/bad.py": 'parser.add_argument("--x", type=int)\n'})
    assert unbounded(tmp_path) == ["bad.py: int"]


RAY = ["scripts/ray/train.py", "--ranks"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([sys.executable, *RAY, "0", "--", "x"], "argument --ranks: '0': allowed is 1 .. 65536"),
        ([sys.executable, *RAY, "1", "--gpus-per-rank", "-1", "--", "x"], "argument --gpus-per-rank: '-1'"),
        ([sys.executable, *RAY, "1", "--gpus-per-rank", "1.5", "--", "x"], "--gpus-per-rank 1.5: allowed is"),
        ([sys.executable, *RAY, "1", "--cpus-per-rank", "x", "--", "x"], "argument --cpus-per-rank: 'x'"),
        ([sys.executable, "scripts/native_stub.py", "--check"], "unrecognized arguments: --check"),
        (["scripts/soft_roce.sh", "--loss", "101", "true"], "--loss 101: allowed is 0 .. 100"),
        (["scripts/soft_roce.sh", "--limit", "0", "true"], "--limit 0: allowed is 1 .. 1000000"),
        (["scripts/soft_roce.sh", "--memory", HUGE, "true"], ": allowed is 512 .. 1000000"),
        (["env", "RANKS=x", "scripts/gpu_checks.sh", "tests"], "RANKS = x: allowed is 1 .. 9999"),
        (["scripts/gpu_checks.sh", "everything"], "everything: none of tests domains"),
        (["scripts/several_hosts.sh", "--hosts", "0", "true"], "--hosts 0: allowed is 1 .. 200"),
        (["scripts/several_hosts.sh", "--hosts", HUGE, "true"], ": allowed is 1 .. 200"),
        (["scripts/megatron_versions.sh", "newest"], "newest: no release of megatron-core"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_scripts_refuse(words: list[str], text: str) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and text in done.stderr, done
    assert len(done.stderr.splitlines()) < 12 and "Traceback" not in done.stderr


def test_ray_is_said_to_be_missing() -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("ray is installed")
    words = [sys.executable, *RAY, "1", "--", "x"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "ray is not installed here: pip install ray\n" and done.returncode == 2
