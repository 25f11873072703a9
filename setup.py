"""Builds `uccl_ep_train._native` from csrc/. Metadata: pyproject.toml. Torch is not needed."""

import os
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# The environment is read in one file only; it needs nothing but the standard library.
ENV = runpy.run_path(str(ROOT / "uccl_ep_train" / "env.py"))
WERROR = ENV["warnings_are_errors"]()

COMPILE_FLAGS = [
    "-O3",
    # Results are bit-exact by contract: no reassociation and no fused multiply-add behind our back.
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    # Writes the headers each object depends on next to it, for `needs_recompile`.
    "-MMD",
    # Warnings of other people's headers are not ours to fix.
    *(f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))),
    *(["-Werror"] if WERROR else []),
]


def find_nvcc() -> str | None:
    """The CUDA compiler, or None. Its absence is no error: the host backend alone is built."""
    home = ENV["read"]("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def needs_recompile(obj: str, src: str) -> bool:
    """True when the object is older than its source, a header it includes, or the flags in this file."""
    dependencies = Path(obj).with_suffix(".d")
    try:
        built = os.stat(obj).st_mtime
        named = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return any(os.stat(ROOT / path).st_mtime > built for path in [src, "setup.py", *named])
    except (OSError, IndexError):
        return True


class BuildExt(build_ext):
    """Objects stay in build/, for editable installs too: a second build compiles only what changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        kind = "werror" if WERROR else "plain"
        self.build_temp = str(Path("build") / f"objects-{sys.implementation.cache_tag}-{kind}")


def extension() -> Pybind11Extension:
    csrc = ROOT / "csrc"
    cuda = csrc / "backend" / "cuda"
    sources = [path for path in sorted(csrc.rglob("*.cc")) if cuda not in path.parents]
    headers = [path for pattern in ("*.h", "*.hpp") for path in sorted(csrc.rglob(pattern))]
    return Pybind11Extension(
        "uccl_ep_train._native",
        sources=[str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in headers],
        include_dirs=["csrc"],
        cxx_std=20,
        extra_compile_args=COMPILE_FLAGS,
        libraries=["rt", "pthread"],
    )


nvcc = find_nvcc()
if nvcc:
    print(f"uccl_ep_train: found {nvcc}; this version has no CUDA backend, only the host backend is built")
else:
    print("uccl_ep_train: no nvcc found; the host backend is built")

ParallelCompile(needs_recompile=needs_recompile).install()
setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt})
