"""The C interface, called by compiled JAX programs through JAX's foreign function interface, on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from uccl_ep_train.tools import c_interface

HERE = Path(__file__).resolve().parent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler (g++)"),
]


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("jax_ffi") / "libjax_ffi.so"
    headers = importlib.import_module("jax").ffi.include_dir()
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-isystem", headers]
    words = [*options, *c_interface.cflags(), HERE / "jax_ffi.cc", "-o", library, *c_interface.libs()]
    done = subprocess.run(["g++", *map(str, words)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return library


def run(program: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(program), *map(str, words)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_jax_calls_it_through_its_ffi(handlers: Path) -> None:
    """A compiled layer, its gradients, and the error of too little room."""
    done = run(HERE / "jax_rank.py", handlers)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 ranks, all values are right\n"


# The case, an expected value, another one, and what the error is about.
CHANGES = [
    ("layer", "x_of(source)[token]", "x_of(source)[token] + 1", "rows"),
    ("layer", "len(of_expert) for", "len(of_expert) + 1 for", "counts"),
    ("layer", "out, sums *", "out, 1 + sums *", "sums"),
    ("gradients", "of_x, sums *", "of_x, 1 + sums *", "gradient of x"),
    (
        "gradients",
        "of_factors, np.array(right)",
        "of_factors, 1 + np.array(right)",
        "gradient of the factors",
    ),
    ("room", "there is room for {room}", "there is room for {room + 1}", "room"),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[-1])
def test_a_wrong_value_is_found(handlers: Path, tmp_path: Path, change: tuple[str, str, str, str]) -> None:
    """Control: a program that expects another value."""
    case, right, wrong, what = change
    text = (HERE / "jax_rank.py").read_text()
    assert text.count(right) == 1
    (tmp_path / "jax_rank.py").write_text(text.replace(right, wrong))
    done = run(tmp_path / "jax_rank.py", handlers, case)
    assert done.returncode == 1 and f"AssertionError: {what}: " in done.stderr, done.stderr
