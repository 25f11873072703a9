"""Builds `uccl_ep_train._native` from csrc/. Metadata: pyproject.toml. Torch is not needed."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CUDA = ROOT / "csrc" / "backend" / "cuda"
# The environment is read in one file only; it needs nothing but the standard library.
ENV = runpy.run_path(str(ROOT / "uccl_ep_train" / "env.py"))
WERROR = ENV["warnings_are_errors"]()
SANITIZER = ENV["sanitizer"]()
SANITIZE = [f"-fsanitize={SANITIZER}", "-fno-sanitize-recover=all"] if SANITIZER else []

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
    *([*SANITIZE, "-O1", "-g1", "-fno-omit-frame-pointer"] if SANITIZER else []),
]


def find_nvcc() -> str | None:
    """The CUDA compiler, or None. Its absence is no error: the host backend alone is built."""
    home = ENV["read"]("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def find_toolkit(compiler: str) -> Path:
    """The folder with the headers and libraries of `compiler`, which may be a wrapper elsewhere."""
    places = [Path(compiler).resolve().parents[1], Path(ENV["read"]("CUDA_HOME", "/usr/local/cuda"))]
    for place in places:
        if (place / "include" / "cuda_runtime.h").is_file():
            return place
    raise SystemExit(f"{compiler} has no include/cuda_runtime.h beside it; set CUDA_HOME (tried {places})")


def needs_recompile(obj: str, src: str) -> bool:
    """True when the object is older than its source, a header it includes, or the flags in this file."""
    dependencies = Path(obj).with_suffix(".d")
    try:
        built = os.stat(obj).st_mtime
        named = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return any(os.stat(ROOT / path).st_mtime > built for path in [src, "setup.py", *named])
    except (OSError, IndexError):
        return True


CUDA_FLAGS = [
    "-std=c++20",
    "-O3",
    # As on the host: no contraction behind our back. Flushing to zero is off by default.
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "--diag-suppress=177",  # never referenced: what the kernels of one architecture alone call
    "-lineinfo",  # profilers show the source
    "-Xptxas=-v",  # registers and spills of each kernel, for tests/native/test_kernels.py
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    # Hopper's bulk copies, and plain loads for what came before and comes after.
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_80,code=compute_80",
    *(["--Werror=all-warnings"] if WERROR else []),
]


class BuildExt(build_ext):
    """Objects stay in build/, for editable installs too: a second build compiles only what changed."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        if nvcc:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                ext.extra_objects = list(pool.map(self.compile_kernel, sorted(CUDA.glob("*.cu"))))
        super().build_extension(ext)

    def compile_kernel(self, source: Path) -> str:
        """Compiles one file of kernels by nvcc; its object."""
        relative = str(source.relative_to(ROOT))
        obj = Path(self.build_temp) / f"{relative}.o"
        if needs_recompile(str(obj), relative):
            obj.parent.mkdir(parents=True, exist_ok=True)
            dependencies = str(obj.with_suffix(".d"))
            done = subprocess.run(
                [
                    str(nvcc),
                    *CUDA_FLAGS,
                    "-Icsrc",
                    "-MMD",
                    "-MF",
                    dependencies,
                    "-c",
                    relative,
                    "-o",
                    str(obj),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"nvcc failed for {relative}:\n{done.stdout}")
            obj.with_suffix(".ptxas").write_text(done.stdout)
        return str(obj)

    def finalize_options(self) -> None:
        super().finalize_options()
        kind = ("werror" if WERROR else "plain") + ("-cuda" if nvcc else "") + (SANITIZER and f"-{SANITIZER}")
        self.force = (
            True  # link anew: nvcc may have come or gone since. Objects are kept, see needs_recompile.
        )
        self.build_temp = str(Path("build") / f"objects-{sys.implementation.cache_tag}-{kind}")


def extension() -> Pybind11Extension:
    csrc = ROOT / "csrc"
    sources = sorted(csrc.rglob("*.cc"))
    headers = [path for pattern in ("*.h", "*.cuh") for path in sorted(csrc.rglob(pattern))]
    options: dict[str, list] = {
        "include_dirs": ["csrc"],
        "libraries": ["rt", "pthread", "dl"],
    }
    if nvcc:
        toolkit = find_toolkit(nvcc)
        options["include_dirs"].append(str(toolkit / "include"))
        options["define_macros"] = [("UCCL_EP_CUDA", "1")]
        # Static: it looks for the driver when it is first used, so the library loads where there is no GPU.
        options["libraries"].insert(0, "cudart_static")
        options["library_dirs"] = [str(toolkit / "lib64"), str(toolkit / "targets" / "x86_64-linux" / "lib")]
    else:
        sources = [path for path in sources if "cuda" not in (path.parent.name, path.stem)]
    return Pybind11Extension(
        "uccl_ep_train._native",
        sources=[str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in headers],
        cxx_std=20,
        extra_compile_args=COMPILE_FLAGS,
        extra_link_args=SANITIZE,
        **options,
    )


nvcc = find_nvcc()
print(
    f"uccl_ep_train: found {nvcc}; both backends are built"
    if nvcc
    else "uccl_ep_train: no nvcc; the host backend is built"
)

ParallelCompile(needs_recompile=needs_recompile).install()
setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt})
