"""For setup.py: how kernels are compiled for CUDA, and for which architectures.

UCCL_EP_CUDA_ARCHS selects them: "auto" (those of this machine's GPUs), "all", "none", or names from `KNOWN`.
`python csrc/gpu/cuda/build.py` prints the selected names in one line.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def _binary(name: str) -> list[str]:
    return [f"-gencode=arch=compute_{name},code=sm_{name}"]


# From 90 on, kernels use bulk copies; before 90, plain loads. "90" is PTX, for GPUs that are not listed or
# are newer.
KNOWN = {
    "80": _binary("80"),
    "90a": _binary("90a"),
    "100a": _binary("100a"),
    "103a": _binary("103a"),
    "120a": _binary("120a"),
    "90": ["-gencode=arch=compute_90,code=compute_90"],
}
OF_CAPABILITY = {(9, 0): "90a", (10, 0): "100a", (10, 3): "103a", (12, 0): "120a"}
LEAST = (8, 0)


def of_capability(capability: str) -> str | None:
    """The architecture for a GPU of a compute capability such as "9.0"; None if there is none."""
    major, minor = (int(part) for part in capability.split("."))
    if (major, minor) < LEAST:
        return None
    return "80" if major == LEAST[0] else OF_CAPABILITY.get((major, minor), "90")


def of_this_machine() -> list[str]:
    """Architectures of this machine's GPUs, as nvidia-smi lists them; empty if there are none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    command = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return []
    found = {name for line in done.stdout.split() if (name := of_capability(line)) is not None}
    return [name for name in KNOWN if name in found]


def chosen(asked: str) -> list[str]:
    """The selected names, in the order of `KNOWN`. Raises a SystemExit that names what is allowed."""
    words = asked.replace(",", " ").split()
    if words in ([], ["auto"]):
        return of_this_machine()
    if words == ["none"]:
        return []
    if words == ["all"]:
        return list(KNOWN)
    if any(word not in KNOWN for word in words):
        allowed = "auto | all | none, or some of " + ", ".join(KNOWN)
        raise SystemExit(f"environment variable UCCL_EP_CUDA_ARCHS = {asked!r}: allowed is {allowed}")
    return [name for name in KNOWN if name in words]


def known_to(listed: str, names: list[str]) -> tuple[list[str], list[str]]:
    """`names` with PTX in place of those that a compiler does not know; and the names that it does not know.

    listed  what `nvcc --list-gpu-arch` prints
    """
    numbers = set(re.findall(r"compute_(\d+)", listed))
    lacking = [name for name in names if name.rstrip("a") not in numbers]
    kept = {"90" if name in lacking else name for name in names}
    return [name for name in KNOWN if name in kept], lacking


def folder_suffix(names: list[str]) -> str:
    """The end of the name of the folder with the objects for these architectures."""
    return "" if not names else "-cuda" if names == list(KNOWN) else "-cuda_" + "_".join(names)


def find_compiler(cuda_home: str) -> str | None:
    """The path of nvcc. None: only the host backend is built."""
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(cuda_home) / "bin"))


def find_toolkit(compiler: str, cuda_home: str) -> Path:
    """The folder with the headers and libraries of `compiler`, which may be a wrapper elsewhere."""
    places = [Path(compiler).resolve().parents[1], Path(cuda_home)]
    for place in places:
        if (place / "include" / "cuda_runtime.h").is_file():
            return place
    raise SystemExit(f"{compiler} has no include/cuda_runtime.h beside it; set CUDA_HOME (tried {places})")


def flags(names: list[str], *, werror: bool) -> list[str]:
    """nvcc's flags for kernels of these architectures."""
    return [
        "-std=c++20",
        "-O3",
        # As on the host, multiply-adds are not fused. Flushing to zero is off by default.
        "-fmad=false",
        "--expt-relaxed-constexpr",
        "--diag-suppress=177",  # "never referenced": functions of one architecture's kernels
        "-lineinfo",  # profilers show the source
        "-Xptxas=-v",  # registers and spills of each kernel, for tests/native/test_kernels.py
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        *(flag for name in names for flag in KNOWN[name]),
        *(["--Werror=all-warnings"] if werror else []),
    ]


def editor_command(toolkit: Path, name: str) -> list[str]:
    """Clang's command for a kernel of one architecture: editors do not understand nvcc's."""
    return ["clang++", "-xcuda", f"--cuda-path={toolkit}", f"--cuda-gpu-arch=sm_{name}", "-std=c++20"]


def linked_with(toolkit: Path) -> dict[str, list]:
    """Link options of the extension. The static runtime looks for the driver when it is first used, so the
    library also loads where there is no GPU."""
    return {
        "libraries": ["cudart_static"],
        "library_dirs": [str(toolkit / "lib64"), str(toolkit / "targets" / "x86_64-linux" / "lib")],
    }


if __name__ == "__main__":
    env = runpy.run_path(str(ROOT / "uccl_ep_train" / "settings" / "env.py"))
    print(*chosen(env["cuda_architectures"]()))
