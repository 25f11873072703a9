"""For setup.py: the GPU architectures that kernels are compiled for.

UCCL_EP_CUDA_ARCHS says which: "auto" (those of this machine's GPUs), "all", "none", or names out of `KNOWN`.
`python csrc/architectures.py` prints the names that it comes to, in a line.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Hopper's bulk copies, and plain loads for what came before and comes after.
KNOWN = {
    "80": ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_80,code=compute_80"],
    "90a": ["-gencode=arch=compute_90a,code=sm_90a"],
}
LEAST = (8, 0)


def of_capability(capability: str) -> str | None:
    """Which one a GPU of compute capability "9.0" takes; None if there is none for it."""
    major, minor = (int(part) for part in capability.split("."))
    if (major, minor) < LEAST:
        return None
    return "90a" if (major, minor) == (9, 0) else "80"


def of_this_machine() -> list[str]:
    """Of its GPUs, as nvidia-smi tells; none where there is none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    command = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return []
    return sorted({name for line in done.stdout.split() if (name := of_capability(line)) is not None})


def chosen(asked: str) -> list[str]:
    """Sorted. Raises SystemExit, which names what is allowed."""
    words = asked.replace(",", " ").split()
    if words in ([], ["auto"]):
        return of_this_machine()
    if words == ["none"]:
        return []
    if words == ["all"]:
        return sorted(KNOWN)
    unknown = [word for word in words if word not in KNOWN]
    if unknown:
        allowed = "auto | all | none, or some of " + ", ".join(KNOWN)
        raise SystemExit(f"environment variable UCCL_EP_CUDA_ARCHS = {asked!r}: allowed is {allowed}")
    return sorted(set(words))


def folder_suffix(names: list[str]) -> str:
    """Of the objects that are compiled for them."""
    return "" if not names else "-cuda" if names == sorted(KNOWN) else "-cuda_" + "_".join(names)


if __name__ == "__main__":
    env = runpy.run_path(str(ROOT / "uccl_ep_train" / "env.py"))
    print(*chosen(env["cuda_architectures"]()))
