"""What ptxas says of the kernels: nothing is spilled to memory, on any architecture they are built for."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
SOURCES = sorted((ROOT / "csrc" / "backend" / "cuda").glob("*.cu"))

pytestmark = pytest.mark.skipif(not Path(NVCC).is_file(), reason=f"no nvcc ({NVCC})")


def spills(report: str) -> list[tuple[str, str]]:
    """(function, what ptxas says) of those that spill; raises if the report has no functions."""
    found = re.findall(r"Function properties for (\S+)\s*\n\s*(\d+ bytes stack frame.*)", report)
    assert found, report
    return [(name, text) for name, text in found if " 0 bytes spill stores, 0 bytes spill loads" not in text]


def reports_of(source: Path) -> list[Path]:
    """What the compiler said when the extension was built; the newest build counts."""
    name = f"build/objects-*-cuda*/csrc/backend/cuda/{source.name}.ptxas"
    return sorted(ROOT.glob(name), key=lambda path: path.stat().st_mtime)


def built_for(report: Path) -> list[str]:
    """Architectures that its build has binaries of, by the folder of its objects."""
    folder = report.relative_to(ROOT / "build").parts[0]
    names = folder.rpartition("-cuda")[2].strip("_").split("_")
    architectures = runpy.run_path(str(ROOT / "csrc" / "architectures.py"), run_name="architectures")
    return [name for name in (names if names != [""] else architectures["KNOWN"]) if name != "90"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_kernel_spills_registers(source: Path) -> None:
    reports = reports_of(source)
    if not reports:
        pytest.skip("the extension was built without kernels; UCCL_EP_CUDA_ARCHS=all builds them")
    newest = reports[-1]
    assert newest.stat().st_mtime > source.stat().st_mtime, f"{newest} is of an older {source.name}"
    report = newest.read_text()
    for architecture in built_for(newest):
        assert f"for 'sm_{architecture}'" in report
    assert spills(report) == []


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
    command = [
        NVCC,
        "-gencode=arch=compute_80,code=sm_80",
        "-Xptxas=-v",
        "-cubin",
        "greedy.cu",
        "-o",
        "greedy.cubin",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    found = spills(done.stdout + done.stderr)
    assert len(found) == 1 and "greedy" in found[0][0]
