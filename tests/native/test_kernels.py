"""Kernels for every GPU architecture, as ptxas sees them: nothing is spilled to memory."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.native import kernels as reports
from tests.native.building import CSRC
from tests.native.kernels import ARCHITECTURES, NVCC, SOURCES, kernels_of, known, report_of

pytestmark = pytest.mark.skipif(not Path(NVCC).is_file(), reason=f"no nvcc ({NVCC})")

FEWEST_THREADS = 384  # of a block of the large kernels
REGISTERS = 65536  # of an SM


def static_shared_bytes() -> int:
    """What the engine leaves to kernels, of the shared memory that it gives them."""
    text = (CSRC / "backend" / "gpu" / "shared.h").read_text()
    return int(re.findall(r"kStaticSharedBytes = (\d+);", text)[0])


@pytest.mark.parametrize(
    ("source", "architecture"),
    [
        pytest.param(
            source,
            name,
            id=f"{source.stem}-{name}",
            marks=[] if reports.is_chosen(source, name) else pytest.mark.slow,
        )
        for source in SOURCES
        for name in ARCHITECTURES
    ],
)
@pytest.mark.timeout(1200)  # it may compile
def test_kernels_fit(source: Path, architecture: str) -> None:
    if architecture not in known():
        pytest.skip(f"{NVCC} does not know sm_{architecture}")
    kernels = kernels_of(report_of(source, architecture))
    assert any(kernel.registers for kernel in kernels)
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.registers <= REGISTERS // FEWEST_THREADS, kernel
        assert kernel.shared_bytes <= static_shared_bytes(), kernel


@pytest.mark.timeout(1200)
def test_bulk_copies_are_compiled_where_there_are_some() -> None:
    """Control: of an architecture without them such kernels are empty."""
    if not {"80", "90a"} <= set(known()):
        pytest.skip(f"{NVCC} does not know sm_80 and sm_90a")
    combine = next(source for source in SOURCES if source.stem == "combine")
    fewest = {
        name: min(k.registers for k in kernels_of(report_of(combine, name)) if k.registers)
        for name in ("80", "90a")
    }
    assert fewest["80"] < 32 < fewest["90a"]


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
    command = [NVCC, "-gencode=arch=compute_80,code=sm_80", "-Xptxas=-v", "-cubin"]
    command += ["greedy.cu", "-o", "greedy.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    kernels = kernels_of(done.stdout + done.stderr)
    assert [kernel.spilled_bytes > 0 for kernel in kernels] == [True] and "greedy" in kernels[0].name
    with pytest.raises(ValueError, match="no function"):
        kernels_of("ptxas info    : 0 bytes gmem")


def test_the_report_of_a_build_is_used_while_nothing_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "CSRC", tmp_path / "csrc")
    source, report = (
        tmp_path / "csrc" / "some.cu",
        tmp_path / "build/objects-x-plain-cuda_90a/csrc/some.cu.ptxas",
    )
    for path, text in ((source, ""), (report, "said")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    os.utime(source, (1, 1))
    assert reports.of_the_build(source, "90a") == "said"
    assert reports.of_the_build(source, "80") is None
    header = source.with_suffix(".cuh")
    header.touch()
    os.utime(report, (2, 2))
    assert reports.of_the_build(source, "90a") is None
