"""Compiles and links the tests' native programs. Objects are kept under build/, for all programs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
# The product's own sources that most programs link.
PARTS = ("common", "layout", "transport", "proxy")
FLAGS = ("-std=c++20", "-g1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-ffp-contract=off")

STANDARD = CSRC / "common" / "standard.h"

OBJECTS = ROOT / "build" / "native_claims"
OBJECTS_KEPT_SECONDS = 86400.0  # since they were last used

LAYER = "gpu/cuda"  # below CSRC: the device layer that a GPU has
# The stand-in for GPUs: its own device layer comes first, kernels are C++ to the compiler.
GPU_ON_CPU = HERE / "gpu_on_cpu"
GPU_FOLDERS = (GPU_ON_CPU / "headers", GPU_ON_CPU)
KERNEL_OPTIONS = (
    "-Wno-unknown-pragmas",
    "-Wno-parentheses",
    "-Wno-shadow",
    "-x",
    "c++",
)


class CannotBuild(RuntimeError):
    """There is no compiler, or it found a mistake."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """How a program is compiled and linked."""

    name: str
    options: tuple[str, ...]
    compiler: str = "g++"
    # By g++ the headers of the standard library are compiled once. Not everywhere: no source needs it.
    precompiled: bool = False
    # Of the stand-in for GPUs: lanes of a warp, and how many lanes go in lock step (1: none do).
    lanes: int = 32
    wave: int = 1

    def options_on_cpu(self, source: Path) -> list[str]:
        """What a source that sees the stand-in needs to know of lanes; nothing where that is the usual.

        What switches lanes is not sanitized: that took a third of the time. AddressSanitizer knows of lanes.
        """
        lanes = [f"-DGPU_ON_CPU_LANES={self.lanes}"] if self.lanes != 32 else []
        wave = [f"-DGPU_ON_CPU_WAVE={self.wave}"] if self.wave != 1 and source.parent == GPU_ON_CPU else []
        switches = source == GPU_ON_CPU / "lanes.cc" and any("address" in option for option in self.options)
        fast = ["-O2", "-fno-sanitize=all", "-DGPU_ON_CPU_ADDRESS"] if switches else []
        return lanes + wave + fast


def _sanitized(name: str, sanitizers: str) -> Flavour:
    flags = ("-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    return Flavour(name=name, options=flags)


MEMORY = replace(_sanitized("memory", "address,undefined"), precompiled=True)
# g++ 12 warns of its own headers here if they are precompiled.
THREAD = _sanitized("thread", "thread")
PLAIN = Flavour(name="plain", options=("-O2",))
PRODUCT = Flavour(name="product", options=("-O3", "-fno-fast-math"))


def run(
    command: Sequence[str | Path], timeout: float, *, libraries: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """libraries: a folder whose shared libraries come before the system's."""
    environment = None if libraries is None else {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env=environment,
    )


def compiler(name: str = "g++") -> str:
    found = shutil.which(name)
    if found is None:
        raise CannotBuild(f"{name} is not on the path")
    return found


def product_sources(parts: Iterable[str] = PARTS) -> list[Path]:
    """What needs no GPU."""
    return sorted(path for part in parts for path in (CSRC / part).rglob("*.cc") if "gpu" not in path.parts)


def gpu_sources() -> list[Path]:
    """What is for GPUs, and the stand-in that it runs on."""
    product = [path for path in CSRC.rglob("*.c[cu]") if "gpu" in path.parts]
    return sorted([*product, *GPU_ON_CPU.glob("*.cc")])


_precompiling = threading.Lock()


def _precompiled(flavour: Flavour, options: Sequence[str]) -> list[str]:
    """Options by which a source of `flavour` gets the precompiled headers. Makes them if they are missing."""
    if not flavour.precompiled:
        return []
    made_of = " ".join([flavour.compiler, *options]).encode() + STANDARD.read_bytes()
    header = OBJECTS / f"standard-{hashlib.sha256(made_of).hexdigest()[:24]}.h"
    compiled_header = header.with_suffix(".h.gch")
    with _precompiling:
        if not compiled_header.exists():
            shutil.copyfile(STANDARD, header)
            unfinished = header.with_suffix(f".{os.getpid()}")
            given = [*options, "-w", "-x", "c++-header", "-c", str(header), "-o", str(unfinished)]
            _need(run([compiler(flavour.compiler), *given], 600))
            unfinished.rename(compiled_header)
    for path in (header, compiled_header):
        path.touch()
    return ["-include", str(header)]


@cache
def _headers_text(folders: tuple[Path, ...]) -> bytes:
    return b"".join(path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.*h")))


def compiled(source: Path, flavour: Flavour, folders: tuple[Path, ...]) -> Path:
    """The object of a source, named by all that it depends on, so never stale. `folders`: of headers."""
    options = [*FLAGS, *flavour.options]
    if GPU_ON_CPU in folders:
        options += flavour.options_on_cpu(source)
    if source.suffix == ".cu" or b'.cuh"' in source.read_bytes():
        # Bulk copies come with warps of 32 lanes.
        arch = (
            ["-D__CUDA_ARCH__=900"]
            if flavour.lanes == 32
            else ["-D__CUDA_ARCH__=800", "-Wno-unused-parameter"]
        )
        options += [*arch, *KERNEL_OPTIONS]
    made_of = " ".join([flavour.compiler, *options]).encode()
    text = b"\0".join([made_of, _headers_text(folders), source.read_bytes()])
    OBJECTS.mkdir(parents=True, exist_ok=True)
    obj = OBJECTS / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:24]}.o"
    if obj.exists():
        obj.touch()
        return obj
    unfinished = obj.with_suffix(f".{os.getpid()}")
    includes = [f"-I{folder}" for folder in folders]
    given = [*options, *_precompiled(flavour, options), *includes]
    _need(run([compiler(flavour.compiler), *given, "-c", source, "-o", unfinished], 600))
    unfinished.rename(obj)  # another session may be making the same one
    return obj


def _folders_of(source: Path, on_cpu: bool, tested: Path) -> tuple[Path, ...]:
    csrc = next((folder for folder in source.parents if folder.name == "csrc"), None)  # a copy of it, too
    if csrc is not None:
        return (*GPU_FOLDERS, csrc, csrc / LAYER) if "gpu" in source.parts and on_cpu else (csrc,)
    gpu = GPU_FOLDERS if on_cpu else ()
    return tuple(dict.fromkeys((*gpu, tested, tested / LAYER, HERE, source.parent)))


def objects_of(sources: Sequence[Path], flavour: Flavour, tested: Path = CSRC) -> list[Path]:
    """Of a program; the product's own sources see its headers alone, and those of the stand-in for GPUs if
    that is among them. The tests' sources see the headers of `tested`."""
    on_cpu = any(source.parent == GPU_ON_CPU for source in sources)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(
            pool.map(
                lambda source: compiled(source, flavour, _folders_of(source, on_cpu, tested)),
                sorted(set(sources)),
            )
        )


def link(binary: Path, sources: Sequence[Path], flavour: Flavour, tested: Path = CSRC) -> Path:
    """Makes the program of `sources`; the tests' own see the headers of `tested`."""
    objects = objects_of(sources, flavour, tested)
    unfinished = binary.with_name(f"{binary.name}.{os.getpid()}")
    libraries = ("-pthread", "-lrt", "-ldl")
    _need(run([compiler(), *flavour.options, *objects, "-o", unfinished, *libraries], 300))
    unfinished.rename(binary)
    return binary


def link_shared(library: Path, source: Path) -> None:
    """A shared library of one source, without the sanitizers, which are the program's."""
    folders = [f"-I{folder}" for folder in (CSRC, HERE)]
    hidden = ("-fPIC", "-shared", "-fvisibility=hidden")
    _need(run([compiler(), *FLAGS, "-O1", *hidden, *folders, source, "-o", library], 300))


def drop_old_objects() -> None:
    for obj in OBJECTS.glob("*"):
        if obj.stat().st_mtime < time.time() - OBJECTS_KEPT_SECONDS:
            obj.unlink(missing_ok=True)


def _need(result: subprocess.CompletedProcess[str]) -> None:
    if result.returncode != 0:
        raise CannotBuild(result.stderr)
