"""Compiles kernels for each GPU architecture, and reads what ptxas says of them.

`python -m tests.native.kernels` prints it: registers, spilled bytes and shared memory of every kernel.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.native.building import CSRC, LAYER, OBJECTS, CannotBuild

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
SOURCES = sorted((CSRC / "backend" / "gpu").glob("*.cu"))
BUILD: dict[str, Any] = runpy.run_path(str(CSRC / LAYER / "build.py"), run_name="build")
# Those with code of their own; the last of `KNOWN` is PTX for what comes after.
ARCHITECTURES = tuple(name for name in BUILD["KNOWN"] if name != "90")
# In every run; the others, which are like one of these, with -m slow. A compiler needs minutes for each.
CHOSEN = ("80", "90a", "100a")


def is_chosen(source: Path, architecture: str) -> bool:
    """Kernels of a dispatch leave a quarter of the registers free: one architecture is enough."""
    return architecture in CHOSEN and (source.stem != "dispatch" or architecture == "90a")


_KERNEL = re.compile(
    r"Function properties for (\S+)\s*\n"
    r"\s*\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s*\n"
    r"(?:ptxas info\s*: Used (\d+) registers(.*))?"
)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A function of the GPU. What is no kernel but called by one has no registers of its own: 0."""

    name: str
    spilled_bytes: int
    registers: int
    shared_bytes: int


def kernels_of(report: str) -> list[Kernel]:
    """Raises ValueError for a report without functions."""
    found = []
    for name, stored, loaded, registers, rest in _KERNEL.findall(report):
        shared = re.search(r"(\d+) bytes smem", rest)
        found.append(
            Kernel(
                name=name,
                spilled_bytes=int(stored) + int(loaded),
                registers=int(registers or 0),
                shared_bytes=int(shared.group(1)) if shared else 0,
            )
        )
    if not found:
        raise ValueError(f"no function in what ptxas says:\n{report}")
    return found


@cache
def known() -> tuple[str, ...]:
    """Architectures that the compiler here knows; none without one."""
    if not Path(NVCC).is_file():
        return ()
    listed = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    lacking = BUILD["known_to"](listed, list(ARCHITECTURES))[1]
    return tuple(name for name in ARCHITECTURES if name not in lacking)


@cache
def _text_of_headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(CSRC.rglob("*.*h")))


def of_the_build(source: Path, architecture: str) -> str | None:
    """What ptxas said when setup.py compiled this for that architecture alone, if nothing is newer."""
    texts = [source, *CSRC.rglob("*.*h"), *CSRC.rglob("build.py")]
    newest = max(path.stat().st_mtime for path in texts)
    kept = (source.relative_to(CSRC.parent)).with_suffix(".cu.ptxas")
    for folder in (CSRC.parent / "build").glob(f"objects-*-cuda_{architecture}"):
        if (folder / kept).is_file() and (folder / kept).stat().st_mtime > newest:
            return (folder / kept).read_text()
    return None


def report_of(source: Path, architecture: str) -> str:
    """What ptxas says, of the build or kept under build/ by all that it depends on. Raises CannotBuild."""
    built = of_the_build(source, architecture)
    if built is not None:
        return built
    command = [NVCC, *BUILD["flags"]([architecture], werror=True), f"-I{CSRC}", f"-I{CSRC / LAYER}", "-cubin"]
    made_of = b"\0".join([" ".join(command).encode(), _text_of_headers(), source.read_bytes()])
    OBJECTS.mkdir(parents=True, exist_ok=True)
    kept = OBJECTS / f"{source.stem}-{architecture}-{hashlib.sha256(made_of).hexdigest()[:24]}.ptxas"
    if kept.exists():
        kept.touch()
        return kept.read_text()
    cubin = kept.with_suffix(f".{os.getpid()}.cubin")
    done = subprocess.run(
        [*command, str(source), "-o", str(cubin)], capture_output=True, text=True, timeout=600, check=False
    )
    cubin.unlink(missing_ok=True)
    if done.returncode != 0:
        raise CannotBuild(done.stdout + done.stderr)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    unfinished.write_text(done.stdout + done.stderr)
    unfinished.rename(kept)
    return kept.read_text()


def main() -> None:
    for architecture in known():
        for source in SOURCES:
            for kernel in kernels_of(report_of(source, architecture)):
                print(f"sm_{architecture} {source.stem} {kernel}", flush=True)


if __name__ == "__main__":
    main()
