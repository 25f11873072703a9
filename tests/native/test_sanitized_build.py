"""The extension built with a sanitizer, as UCCL_EP_SANITIZE asks for: operations run in it, and it finds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.building import ROOT, compiler, run

LIBRARIES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}

OPERATIONS = """
import torch
from tests.harness import run_ranks
from uccl_ep_train.core.native import load_native

def step(rank, buffer):
    x, idx = torch.ones(7 + rank, 128), torch.arange(2 * (7 + rank)).reshape(-1, 2) % 8
    result = buffer.dispatch(x.bfloat16(), idx, torch.ones(7 + rank, 2))
    return bool((buffer.combine(result.rows, result.handle) == 2).all())

settings = dict(num_experts=8, hidden=128, domain_size=2, loop_seed=3, dispatch_dtype="bf16")
print(load_native().__file__, run_ranks(4, settings, step))
"""

# Four rows where there are two.
PAST_THE_END = """
import numpy as np
from uccl_ep_train.core.native import load_native

rows, codes, scales = np.zeros(256, np.uint16), np.zeros(512, np.uint8), np.zeros(4, np.float32)
load_native().quantize_fp8(rows.ctypes.data, 4, 128, "pow2", codes.ctypes.data, scales.ctypes.data)
"""

Program = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module", params=LIBRARIES)
def sanitizer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def program(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Runs Python text with the package built so, the sanitizer's library loaded first."""
    folder = tmp_path_factory.mktemp(sanitizer)
    # Without nvcc: what runs on a GPU has a sanitizer of its own (scripts/sanitize.sh).
    parts = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(part for part in parts if not Path(part, "nvcc").exists())
    environ = os.environ | {"UCCL_EP_SANITIZE": sanitizer, "CUDA_HOME": str(folder), "PATH": path}
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1000, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    shutil.copytree(
        ROOT / "uccl_ep_train",
        folder / "uccl_ep_train",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
        dirs_exist_ok=True,
    )
    libraries = [
        run([compiler(), f"-print-file-name={name}"], 60).stdout.strip()
        for name in (LIBRARIES[sanitizer], "libstdc++.so")
    ]

    def run_text(text: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            "ASAN_OPTIONS": "detect_leaks=0",  # of the interpreter
            "LD_PRELOAD": " ".join(libraries),
        }
        return subprocess.run(
            [sys.executable, "-c", text],
            cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    return run_text


@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_operations_run_in_a_sanitized_build(program: Program, sanitizer: str) -> None:
    result = program(OPERATIONS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{sanitizer}0/uccl_ep_train/_native" in result.stdout, result.stdout
    assert "[True, True, True, True]" in result.stdout, result.stdout
    assert "Sanitizer" not in result.stderr, result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_a_sanitized_build_finds_what_is_past_the_end(program: Program, sanitizer: str) -> None:
    """Negative control, for the sanitizer that looks for this."""
    result = program(PAST_THE_END)
    found = "AddressSanitizer: heap-buffer-overflow" in result.stderr
    assert found == (sanitizer == "address"), result.stderr


def test_a_sanitizer_that_there_is_not_is_refused() -> None:
    environ = os.environ | {"UCCL_EP_SANITIZE": "adress"}
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--help"],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert "UCCL_EP_SANITIZE = 'adress': allowed is address | undefined | thread" in result.stderr
