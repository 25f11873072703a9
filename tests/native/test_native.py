"""Runs the claims of the native programs, which are compiled with sanitizers: one case per claim."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
OF_TRANSPORTS = ("ofi", "ofi_fault")  # begin with the name of one
PROGRAMS = (
    "queue", "layout", "loop", "stream", "fault", "life", "device", "engine", "cuda", "nics", *OF_TRANSPORTS
)
# The product's own sources that the programs link.
PARTS = ("common", "layout", "transport", "proxy")
ENGINE_PARTS = (*PARTS, "backend", "engine")
FLAGS = ("-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-ffp-contract=off")
SANITIZERS = {"memory": "address,undefined", "thread": "thread"}
CLAIM = re.compile(r'^CLAIM\("((?:[^"\\]|\\.)*)"\)', re.MULTILINE)

OBJECTS = ROOT / "build" / "native_claims"
OBJECTS_KEPT_SECONDS = 86400.0  # since they were last used

# Which transports the compiler finds the headers of.
OPTIONAL = runpy.run_path(str(CSRC / "transport" / "optional.py"), run_name="optional")
# What a claim prints that cannot be tried here.
SKIPPED = "skipped: "

Build = Callable[[str, str], Path]


def claims_of(program: str) -> list[str]:
    return CLAIM.findall((HERE / f"{program}_claims.cc").read_text())


def cases(sanitizer: str) -> list[object]:
    slow = [pytest.mark.slow] if sanitizer == "thread" else []
    return [
        pytest.param(program, claim, id=f"{program}: {claim}", marks=slow)
        for program in PROGRAMS
        for claim in claims_of(program)
    ]


@cache
def transports() -> Any:
    return OPTIONAL["find_transports"](compiler())


def need_transport(program: str) -> None:
    """Skips the claims of a transport that cannot be compiled here: `ofi`, `ofi_fault`."""
    name = program.split("_")[0]
    if name in transports().missing:
        pytest.skip(transports().missing[name])


def run(command: Sequence[str | Path], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("g++ is not on the path")
    return found


def sources_of(program: str) -> list[Path]:
    parts = ENGINE_PARTS if program == "engine" else PARTS
    product = [path for part in parts for path in (CSRC / part).rglob("*.cc") if "cuda" not in path.parts]
    product = [path for path in product if transports().compiles(path)]
    if program == "cuda":  # what of it needs no CUDA
        product.append(CSRC / "backend" / "cuda" / "layout.cc")
    return [HERE / f"{program}_claims.cc", *sorted(product)]


@cache
def headers_text() -> bytes:
    return b"".join(path.read_bytes() for folder in (CSRC, HERE) for path in sorted(folder.rglob("*.h")))


def compiled(source: Path, sanitizer: str) -> Path:
    """The object of a source. Kept under build/, named by all that it depends on, so never stale."""
    options = [*FLAGS, f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all"]
    options += [f"-isystem{path}" for path in transports().include_dirs]
    text = b"\0".join([" ".join(options).encode(), headers_text(), source.read_bytes()])
    obj = OBJECTS / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:24]}.o"
    if obj.exists():
        obj.touch()
    else:
        unfinished = obj.with_suffix(f".{os.getpid()}")
        result = run([compiler(), *options, f"-I{CSRC}", f"-I{HERE}", "-c", source, "-o", unfinished], 600)
        assert result.returncode == 0, result.stderr
        unfinished.rename(obj)  # another session may be making the same one
    return obj


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Links a program once per session and sanitizer."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    for obj in OBJECTS.iterdir():
        if obj.stat().st_mtime < time.time() - OBJECTS_KEPT_SECONDS:
            obj.unlink(missing_ok=True)
    folder = tmp_path_factory.mktemp("native")

    @cache
    def program_of(program: str, sanitizer: str) -> Path:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: compiled(source, sanitizer), sources_of(program)))
        binary = folder / f"{sanitizer}-{program}"
        options = (f"-fsanitize={SANITIZERS[sanitizer]}", "-pthread", "-lrt", "-ldl")
        result = run([compiler(), *objects, "-o", binary, *options], 300)
        assert result.returncode == 0, result.stderr
        return binary

    return program_of


def holds(build: Build, program: str, claim: str, sanitizer: str) -> None:
    need_transport(program)
    result = run([build(program, sanitizer), claim], 150)
    assert result.returncode == 0, result.stdout + result.stderr
    if result.stdout.startswith(SKIPPED):
        pytest.skip(result.stdout.strip())
    assert result.stdout.startswith("ok: "), result.stdout


# The first case of a program waits for the compiler.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("program", "claim"), cases("memory"))
def test_claim(build: Build, program: str, claim: str) -> None:
    holds(build, program, claim, "memory")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("program", "claim"), cases("thread"))
def test_claim_without_data_races(build: Build, program: str, claim: str) -> None:
    holds(build, program, claim, "thread")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_claim_is_a_case(build: Build, program: str) -> None:
    need_transport(program)
    assert run([build(program, "memory"), "--list"], 60).stdout.splitlines() == claims_of(program)


def test_a_false_claim_fails(tmp_path: Path) -> None:
    """Negative control: neither the harness nor the sanitizers pass what is wrong."""
    source = tmp_path / "false_claims.cc"
    source.write_text(
        '#include "claims.h"\n'
        'CLAIM("one is two") { EXPECT_EQ(1, 2); }\n'
        'CLAIM("a byte past the end is ours") { volatile char* p = new char[4]; p[4] = 1; delete[] p; }\n'
        'CLAIM("one is one") { EXPECT_EQ(1, 1); }\n'
        "int main(int argc, char** argv) { return claims::main(argc, argv); }\n"
    )
    binary = tmp_path / "false"
    options = ("-std=c++20", f"-I{HERE}", f"-fsanitize={SANITIZERS['memory']}")
    assert run([compiler(), *options, source, "-o", binary], 110).returncode == 0
    assert run([binary, "one is one"], 60).returncode == 0
    assert run([binary, "one is two"], 60).returncode == 1
    assert run([binary, "a byte past the end is ours"], 60).returncode != 0
    assert run([binary, "no such sentence"], 60).returncode == 1
