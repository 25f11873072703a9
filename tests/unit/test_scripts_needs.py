"""Scripts say at once what they cannot do here, and a set-up says last what it has left out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE_S = 30.0  # a set-up, a download or a compilation takes longer; loading torch on busy cores does not


def stub(folder: Path, name: str, does: str = "exit 0") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{does}\n")
    (folder / name).chmod(0o755)


def run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "UCCL_EP_APT", "PYTHON")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=AT_ONCE_S,
        check=False,
    )


def left_out(tools: Path) -> list[str]:
    for name in ("sort", "ldd", "bash"):
        if not (tools / name).exists():
            tools.mkdir(exist_ok=True)
            (tools / name).symlink_to(shutil.which(name) or "")
    done = run(["/bin/bash", "-euo", "pipefail", "-c", ". scripts/needs.sh; left_out"], PATH=str(tools))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


def test_what_is_left_out_ends_with_one_command_that_adds_all_of_it(tmp_path: Path) -> None:
    lines = left_out(tmp_path / "tools")
    assert lines[0] == "left out on this machine:"
    assert "  the model checker: spin" in lines
    command = "to add it, on Debian or Ubuntu, as root:  apt-get update && apt-get install -y "
    assert lines[-1].startswith(command)
    added = set(lines[-1].removeprefix(command).split())
    named = {word for line in lines[1:-1] if line.startswith("  ") for word in line.split(": ")[1].split()}
    assert added == named and {"spin", "clang", "qemu-system-x86"} <= added
    stub(tmp_path / "tools", "spin")
    stub(tmp_path / "tools", "clang++")
    then = left_out(tmp_path / "tools")
    assert not {"spin", "clang"} & set(then[-1].split())
    assert not any("model checker" in line for line in then)


def test_a_set_up_takes_no_program_for_python_or_a_compiler_that_only_ends_well(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    set_up = [str(tmp_path / "scripts" / "setup_env.sh")]
    done = run(set_up, PYTHON="/bin/true")
    assert done.returncode == 1
    assert "PYTHON=/bin/true is not a working Python 3.11 or 3.12" in done.stderr
    done = run(set_up, PYTHON=sys.executable, CXX="/bin/true")
    assert done.returncode == 1 and "a C++20 compiler (/bin/true) is missing" in done.stderr
    assert not (tmp_path / ".venv" / "bin").exists()


def test_a_vm_is_not_started_for_a_python_that_only_ends_well(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    kernel = tmp_path / "build" / "soft_roce" / "kernel" / "boot" / "vmlinuz-6"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    # All that a VM needs is there.
    with (tmp_path / "scripts" / "needs.sh").open("a") as needs:
        needs.write("missing_for() { :; }\n")
    done = run([str(tmp_path / "scripts" / "soft_roce.sh")], PYTHON="/bin/true")
    assert done.returncode == 1 and "/bin/true does not load uccl_ep_train" in done.stderr


@pytest.mark.parametrize("script", ["gpu_checks.sh", "sanitize.sh"])
def test_a_script_for_gpus_says_at_once_what_is_missing(script: str, tmp_path: Path) -> None:
    done = run([f"scripts/{script}"], PYTHON=str(tmp_path / "none"))
    assert done.returncode == 77 and f"there is no {tmp_path / 'none'}" in done.stderr
    stub(tmp_path, "python", "echo 'ModuleNotFoundError: no torch' >&2; exit 1")
    done = run([f"scripts/{script}"], PYTHON=str(tmp_path / "python"))
    assert done.returncode == 77 and done.stderr.endswith(
        "does not load the package: ModuleNotFoundError: no torch\n"
    )
    done = run([f"scripts/{script}"], PYTHON="/bin/true")
    assert done.returncode == 77 and done.stderr.endswith(
        "/bin/true is no Python: let PYTHON name an interpreter\n"
    )
    lacking = "lacking: 2 ranks need a GPU each, and torch sees 1"
    stub(tmp_path, "python", f"echo 'a warning' >&2; echo '{lacking}'")
    done = run([f"scripts/{script}"], PYTHON=str(tmp_path / "python"))
    assert done.returncode == 77 and done.stderr == (
        "[gpu] cannot be done here: 2 ranks need a GPU each, and torch sees 1\n"
    )


def test_compute_sanitizer_is_asked_for_before_anything_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    stub(tmp_path / "bin", "python", f'[[ "$*" == *lacking* ]] && echo "lacking: " || echo "$*" >>{ran}')
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = run(["scripts/gpu_checks.sh", "tests", "sanitize"], PYTHON="python", PATH=path)
    assert done.returncode == 77 and "compute-sanitizer is not on PATH" in done.stderr and not ran.exists()
    done = run(["scripts/gpu_checks.sh", "tests", "dreams"], PYTHON="python", PATH=path)
    assert done.returncode == 2 and "dreams: none of tests" in done.stderr and not ran.exists()
    # Negative control: with it, the tests come next.
    stub(tmp_path / "bin", "compute-sanitizer")
    run(["scripts/gpu_checks.sh", "tests", "sanitize"], PYTHON="python", PATH=path, RANKS="1")
    assert "pytest" in ran.read_text()


def test_pretraining_on_gpus_is_refused_before_the_set_up() -> None:
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        pytest.skip("this machine has an NVIDIA driver")
    for words in (["--device", "cuda"], ["--device=cuda"]):
        done = run(["scripts/pretrain.sh", *words])
        assert done.returncode == 1 and done.stdout == ""
        assert "this machine has no NVIDIA GPU" in done.stderr


def test_a_release_that_is_none_is_refused_before_the_set_up() -> None:
    done = run(["scripts/megatron_versions.sh", "0.18.2", "latest", "--", "-k", "latest"])
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("latest: no release")
