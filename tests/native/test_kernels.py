"""What ptxas says of the kernels: nothing is spilled to memory, on any architecture they are built for."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
SOURCES = sorted((ROOT / "csrc" / "backend" / "cuda").glob("*.cu"))

pytestmark = pytest.mark.skipif(not Path(NVCC).is_file(), reason=f"no nvcc ({NVCC})")


def compile_verbosely(source: Path, architecture: str, out: Path) -> str:
    command = [
        NVCC, "-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "--diag-suppress=177",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-Xptxas=-v", "-Icsrc",
        "-cubin", str(source), "-o", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    return done.stdout + done.stderr


def spills(report: str) -> list[tuple[str, str]]:
    """(function, what ptxas says) of those that spill; raises if the report has no functions."""
    found = re.findall(r"Function properties for (\S+)\s*\n\s*(\d+ bytes stack frame.*)", report)
    assert found, report
    return [(name, text) for name, text in found if " 0 bytes spill stores, 0 bytes spill loads" not in text]


@pytest.mark.timeout(300)  # the kernels of a dispatch take a minute for each architecture
def test_no_kernel_spills_registers(tmp_path: Path) -> None:
    jobs = [(source, architecture) for source in SOURCES for architecture in ("90a", "80")]
    assert len(jobs) >= 4
    with ThreadPoolExecutor(2) as pool:
        reports = list(
            pool.map(lambda j: compile_verbosely(j[0], j[1], tmp_path / f"{j[0].stem}.{j[1]}"), jobs)
        )
    assert [spill for report in reports for spill in spills(report)] == []


GREEDY = """
__global__ void __launch_bounds__(1024, 2) greedy(const float* in, float* out, int n) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = in[i * n + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) out[i * n + threadIdx.x] = kept[i] * kept[95 - i] + kept[(i * 7) % 96];
}
"""


def test_spills_are_seen(tmp_path: Path) -> None:
    """Control: a kernel that needs more registers than its blocks leave it."""
    (tmp_path / "greedy.cu").write_text(GREEDY)
    found = spills(compile_verbosely(tmp_path / "greedy.cu", "80", tmp_path / "greedy.cubin"))
    assert len(found) == 1 and "greedy" in found[0][0]
