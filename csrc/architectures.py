"""For setup.py: the GPU architectures that kernels are compiled for.

UCCL_EP_CUDA_ARCHS says which: "auto" (those of this machine's GPUs), "all", "none", or names out of `KNOWN`.
`python csrc/architectures.py` prints the names that it comes to, in a line.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _binary(name: str) -> list[str]:
    return [f"-gencode=arch=compute_{name},code=sm_{name}"]


# From 90 on kernels have bulk copies; before, plain loads. "90" is PTX for what is not listed or comes after.
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
    """Which one a GPU of compute capability "9.0" takes; None if there is none for it."""
    major, minor = (int(part) for part in capability.split("."))
    if (major, minor) < LEAST:
        return None
    return "80" if major == LEAST[0] else OF_CAPABILITY.get((major, minor), "90")


def of_this_machine() -> list[str]:
    """Of its GPUs, as nvidia-smi tells; none where there is none."""
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
    """In the order of `KNOWN`. Raises SystemExit, which names what is allowed."""
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
    """`names` without those that a compiler lacks, in whose place PTX is made; and those.

    listed  what `nvcc --list-gpu-arch` prints
    """
    numbers = set(re.findall(r"compute_(\d+)", listed))
    lacking = [name for name in names if name.rstrip("a") not in numbers]
    kept = {"90" if name in lacking else name for name in names}
    return [name for name in KNOWN if name in kept], lacking


def folder_suffix(names: list[str]) -> str:
    """Of the objects that are compiled for them."""
    return "" if not names else "-cuda" if names == list(KNOWN) else "-cuda_" + "_".join(names)


if __name__ == "__main__":
    env = runpy.run_path(str(ROOT / "uccl_ep_train" / "settings" / "env.py"))
    print(*chosen(env["cuda_architectures"]()))
