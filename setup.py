"""Builds `uccl_ep_train._native` from csrc/. Metadata: pyproject.toml. Torch is not needed."""

import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pybind11
from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools._distutils.ccompiler import gen_preprocess_options
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# Only env.py reads the environment; it needs nothing but the standard library.
ENV = runpy.run_path(str(ROOT / "uccl_ep_train" / "settings" / "env.py"))
WERROR = ENV["warnings_are_errors"]()
SANITIZER = ENV["sanitizer"]()
SANITIZE = [f"-fsanitize={SANITIZER}", "-fno-sanitize-recover=all"] if SANITIZER else []
UNITS = runpy.run_path(str(ROOT / "csrc" / "units.py"), run_name="units")
GPU_LAYER = "csrc/gpu/cuda"  # the vendor's layer: its headers, and in build.py how to compile kernels
GPU = runpy.run_path(str(ROOT / GPU_LAYER / "build.py"), run_name="build")
ARCHS = GPU["chosen"](ENV["cuda_architectures"]())
CUDA_HOME = ENV["read"]("CUDA_HOME", "/usr/local/cuda")

COMPILE_FLAGS = [
    "-O3",
    # Results are bit-exact by contract: the compiler must not reassociate or fuse multiply-adds.
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    # Lists the headers of each object in a file beside it, for `is_current`.
    "-MMD",
    # No warnings about headers of other projects.
    *(f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))),
    *(["-Werror"] if WERROR else []),
    *([*SANITIZE, "-O1", "-g1", "-fno-omit-frame-pointer"] if SANITIZER else []),
]

C_INTERFACE = ("csrc/c_api/convert.cc", "csrc/c_api/uccl_ep.cc")  # of the shared library alone
C_HEADER = "csrc/c_api/uccl_ep.h"
PKG_CONFIG = """prefix=${pcfiledir}/../..
Name: uccl_ep
Description: Dispatch and combine of Mixture-of-Experts models
Version: 1
Cflags: -I${prefix}/include
Libs: -L${prefix}/lib -Wl,-rpath,${prefix}/lib -luccl_ep
"""
BUILD = ("setup.py", "csrc/units.py", f"{GPU_LAYER}/build.py")
STANDARD = "csrc/common/standard.h"  # compiled once, before all units
REPORT = "compile_time.json"
COMMANDS = ROOT / "compile_commands.json"  # how each unit is compiled, for editors


def compiled_for(compiler: str | None) -> list[str]:
    """The requested architectures, with PTX in place of those that the compiler does not know."""
    if compiler is None:
        return []
    names, lacking = GPU["known_to"](run([compiler, "--list-gpu-arch"]), ARCHS)
    if lacking:
        print(f"uccl_ep_train: {compiler} does not know {', '.join(lacking)}: PTX is built in their place")
    return names


def is_current(obj: Path, source: str) -> bool:
    """False if the object is missing, or older than its source, a header it includes or a file of `BUILD`."""
    try:
        built = obj.stat().st_mtime
        named = obj.with_suffix(".d").read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return all(os.stat(ROOT / path).st_mtime <= built for path in [source, *BUILD, *named])
    except (OSError, IndexError):
        return False


def run(command: list[str]) -> str:
    """Returns what the compiler prints. If it fails, ends the build with this output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")
    return done.stdout


def children_seconds() -> float:
    """Processor time of the compilers that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


nvcc = GPU["find_compiler"](CUDA_HOME) if ARCHS else None
TOOLKIT = GPU["find_toolkit"](nvcc, CUDA_HOME) if nvcc else None
BUILT_FOR = compiled_for(nvcc)
GPU_INCLUDES = [GPU_LAYER, str(TOOLKIT / "include")] if nvcc else []
KERNEL_FLAGS = GPU["flags"](BUILT_FOR, werror=WERROR)
LINKED: dict[str, list] = GPU["linked_with"](TOOLKIT) if nvcc else {"libraries": []}
LINKED["libraries"] += ["rt", "pthread", "dl"]


class BuildExt(build_ext):
    """Compiles and links. Objects stay in build/, also for editable installs, and are used while current."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Uses one pool for both compilers, and the longest units first, so that no core idles at the end."""
        kernels = [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cu")] if nvcc else []
        units = UNITS["longest_first"]([*ext.sources, *kernels, *C_INTERFACE])
        objects = {source: self.object_of(source) for source in units}
        if not SANITIZER:
            commands = [{**self.command_of(ext, source), "directory": str(ROOT)} for source in units]
            COMMANDS.write_text(json.dumps(commands, indent=1))
        stale = [source for source in units if not is_current(objects[source], source)]
        self.compile_all(ext, stale, {unit for unit in units if self.folder_of(unit) == self.build_temp})
        ext.sources = []
        ext.extra_objects = sorted(str(objects[unit]) for unit in units if unit not in C_INTERFACE)
        super().build_extension(ext)
        core = [str(objects[unit]) for unit in units if not unit.startswith("csrc/bindings/")]
        self.install_c_interface(sorted(core))

    def install_c_interface(self, objects: list[str]) -> None:
        """The shared library with its header, and what pkg-config says of them: no Python in it."""
        package = Path(self.build_lib) / "uccl_ep_train"
        for folder in ("include", "lib/pkgconfig"):
            (package / folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / C_HEADER, package / "include" / Path(C_HEADER).name)
        (package / "lib" / "pkgconfig" / "uccl_ep.pc").write_text(PKG_CONFIG)
        self.compiler.link_shared_object(
            objects,
            str(package / "lib" / "libuccl_ep.so"),
            **LINKED,
            extra_preargs=SANITIZE,
            extra_postargs=["-Wl,-soname,libuccl_ep.so"],
            target_lang="c++",
        )

    def copy_extensions_to_source(self) -> None:
        """For editable installs."""
        super().copy_extensions_to_source()
        for folder in ("include", "lib"):
            built = Path(self.build_lib) / "uccl_ep_train" / folder
            shutil.copytree(built, ROOT / "uccl_ep_train" / folder, dirs_exist_ok=True)

    def compile_all(self, ext: Pybind11Extension, sources: list[str], own: set[str]) -> None:
        """Prints after each unit how long the rest will take, and writes the total times for CI.

        own: the units that no other kind of build shares
        """
        progress, before = UNITS["Progress"](sources), children_seconds()
        if sources:
            self.compile_standard(ext)
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            running = {pool.submit(self.compile_unit, ext, source): source for source in sources}
            for unit in as_completed(running):
                unit.result()
                print(progress.done(running[unit]), flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
        report = {
            "units": len(own),
            "compiled": len(own.intersection(sources)),
            "shared": len(set(sources) - own),
            "wall_s": round(progress.elapsed_s(), 1),
            "cpu_s": round(children_seconds() - before, 1),
        }
        (Path(self.build_temp) / REPORT).write_text(json.dumps(report))
        print(f"compile time: {report}", flush=True)

    def folder_of(self, source: str) -> str:
        return self.build_temp if UNITS["sees_gpus"](source) else self.shared_temp

    def object_of(self, source: str) -> Path:
        name = f"{source}.o" if source.endswith(".cu") else f"{source[:-3]}.o"
        return Path(self.folder_of(source)) / name

    def command_of(self, ext: Pybind11Extension, source: str) -> dict[str, object]:
        """An entry of compile_commands.json. For a kernel it is clang's: editors do not understand nvcc's."""
        if source.endswith(".cu"):
            command = [*GPU["editor_command"](TOOLKIT, ARCHS[0]), "-Icsrc", f"-I{GPU_LAYER}"]
        else:
            command = [*self.compiler.compiler_so_cxx, *self.flags_of(ext, source)]
        obj = str(self.object_of(source))
        return {"file": source, "output": obj, "arguments": [*command, "-c", source, "-o", obj]}

    def seen_by(self, ext: Pybind11Extension, source: str) -> tuple[list, list[str]]:
        """Macros, and folders of headers."""
        if nvcc and UNITS["sees_gpus"](source):
            return [*ext.define_macros, ("UCCL_EP_CUDA", "1")], [*ext.include_dirs, *GPU_INCLUDES]
        return ext.define_macros, ext.include_dirs

    def flags_of(self, ext: Pybind11Extension, source: str) -> list[str]:
        return gen_preprocess_options(*self.seen_by(ext, source)) + ext.extra_compile_args

    def compile_standard(self, ext: Pybind11Extension) -> None:
        """Precompiles the standard library's headers for g++: they are half of most units."""
        standard = Path(self.shared_temp) / STANDARD
        compiled = standard.with_name(f"{standard.name}.gch")
        if is_current(compiled, STANDARD):
            return
        standard.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / STANDARD, standard)
        command = [
            *self.compiler.compiler_so_cxx,
            *self.flags_of(ext, STANDARD),
            "-w",
            "-x",
            "c++-header",
            str(standard),
        ]
        run([*command, "-MF", str(compiled.with_suffix(".d")), "-o", str(compiled)])

    def compile_unit(self, ext: Pybind11Extension, source: str) -> None:
        if source.endswith(".cu"):
            self.compile_kernels(source)
            return
        faster = [] if SANITIZER or not UNITS["is_cold"](source) else ["-O1"]
        macros, include_dirs = self.seen_by(ext, source)
        self.compiler.compile(
            [source],
            output_dir=self.folder_of(source),
            macros=macros,
            include_dirs=include_dirs,
            extra_preargs=["-include", str(Path(self.shared_temp) / STANDARD)],
            extra_postargs=[*ext.extra_compile_args, *faster],
        )

    def compile_kernels(self, source: str) -> None:
        obj = self.object_of(source)
        obj.parent.mkdir(parents=True, exist_ok=True)
        command = [
            str(nvcc),
            *KERNEL_FLAGS,
            "-Icsrc",
            f"-I{GPU_LAYER}",
            "-MMD",
            "-MF",
            str(obj.with_suffix(".d")),
        ]
        obj.with_suffix(".ptxas").write_text(run([*command, "-c", source, "-o", str(obj)]))

    def finalize_options(self) -> None:
        super().finalize_options()
        kind = "werror" if WERROR else "plain"
        self.force = True  # always link: nvcc may have come or gone. Objects are kept, see is_current.
        prefix, suffix = f"objects-{sys.implementation.cache_tag}-{kind}", SANITIZER and f"-{SANITIZER}"
        self.build_temp = str(Path("build") / f"{prefix}{GPU['folder_suffix'](BUILT_FOR)}{suffix}")
        # Of units that are the same with and without kernels.
        self.shared_temp = str(Path("build") / f"{prefix}{suffix}")


def extension() -> Pybind11Extension:
    csrc = ROOT / "csrc"
    sources = [path for path in sorted(csrc.rglob("*.cc")) if str(path.relative_to(ROOT)) not in C_INTERFACE]
    headers = [path for pattern in ("*.h", "*.cuh") for path in sorted(csrc.rglob(pattern))]
    options: dict[str, list] = {"include_dirs": ["csrc"]}
    if not nvcc:
        sources = [path for path in sources if not UNITS["is_of_gpus"](path.relative_to(csrc))]
    return Pybind11Extension(
        "uccl_ep_train._native",
        sources=[str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in headers],
        cxx_std=20,
        extra_compile_args=COMPILE_FLAGS,
        extra_link_args=SANITIZE,
        **LINKED,
        **options,
    )


if nvcc:
    print(f"uccl_ep_train: both backends are built, for GPUs of {', '.join(BUILT_FOR)} by {nvcc}")
else:
    why = "no nvcc" if ARCHS else "no GPU here, and UCCL_EP_CUDA_ARCHS names no architecture"
    print(f"uccl_ep_train: the host backend is built ({why})")

setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt})
