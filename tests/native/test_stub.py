"""`uccl_ep_train/_native.pyi` says what the bindings of this build say."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pybind11
import pytest

from scripts.native_stub import HEAD, STUB, blocks
from uccl_ep_train.core import cuda
from uccl_ep_train.core.native import load_native

REPAIR = "run scripts/native_stub.py"
OF_GPU = re.compile("gpu")


def written(text: str) -> dict[str, str]:
    """The declaration of each name in a stub."""
    assert text.startswith(HEAD), REPAIR
    found = re.split(r"\n\n", text.removeprefix(HEAD).strip("\n"))
    return {re.split(r"[ (:]", block)[1]: block for block in found}


def stale(text: str, native: types.ModuleType) -> list[str]:
    """Names whose declarations differ. What is bound for GPUs is missing in a build without nvcc."""
    said, bound = written(text), blocks(native)
    if not hasattr(native, "GpuEngine"):
        said = {name: block for name, block in said.items() if not OF_GPU.search(name.lower())}
    return sorted(name for name in {*said, *bound} if said.get(name) != bound.get(name))


def test_the_stub_is_what_the_bindings_say() -> None:
    if pybind11.__version__.split(".")[0] != "3":
        pytest.skip(
            f"pybind11 {pybind11.__version__} words signatures otherwise than 3, which the stub is from"
        )
    assert stale(STUB.read_text(), load_native()) == [], REPAIR
    assert cuda.built() == hasattr(load_native(), "GpuEngine")


def test_what_differs_is_found() -> None:
    text, native = STUB.read_text(), load_native()
    for before, after, name in [
        ("    chunk_bytes: int\n", "", "EngineConfig"),
        ("    chunk_bytes: int\n", "    chunk_bytes: str\n", "EngineConfig"),
        ("    chunk_bytes: int\n", "    chunk_bytes: int\n    added: int\n", "EngineConfig"),
        ("def least_budget(", "def most_budget(", "least_budget"),
        ("host_nics(root: str", "host_nics(place: str", "host_nics"),
        ("class Trial:", "class Attempt:", "Trial"),
    ]:
        assert text.count(before) == 1
        assert name in stale(text.replace(before, after), native)


def test_a_type_checker_understands_the_stub(tmp_path: Path) -> None:
    """A misspelt field and a wrong type are errors of mypy, and right ones are none."""
    pytest.importorskip("mypy")
    (tmp_path / "core.pyi").write_text(STUB.read_text())
    (tmp_path / "uses.py").write_text(
        "from core import EngineConfig\n"
        "EngineConfig().nic.window_ops = 3\n"
        "EngineConfig().nic.window_opps = 3\n"
        "EngineConfig().domain_of = (0, 1)\n"
        "EngineConfig().budget_bytes = 'much'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "uses.py"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert [line.split(":")[1] for line in done.stdout.splitlines()] == ["3", "5"], done.stdout + done.stderr
