"""Runs the claims of the native programs, which are compiled with sanitizers: one case per claim."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.native import building
from tests.native.building import PARTS, run

HERE = Path(__file__).resolve().parent
PROGRAMS = ("queue", "layout", "loop", "stream", "fault", "life", "device", "engine", "cuda")
ENGINE_PARTS = (*PARTS, "backend", "engine")
SANITIZERS = {"memory": building.MEMORY, "thread": building.THREAD}
CLAIM = re.compile(r'^CLAIM\("((?:[^"\\]|\\.)*)"\)', re.MULTILINE)

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


def sources_of(program: str) -> list[Path]:
    product = building.product_sources(ENGINE_PARTS if program == "engine" else PARTS)
    if program == "cuda":  # what of it needs no CUDA
        product.append(building.CSRC / "backend" / "cuda" / "layout.cc")
    return [HERE / f"{program}_claims.cc", *product]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Links a program once per session and sanitizer."""
    if building.shutil.which("g++") is None:
        pytest.skip("g++ is not on the path")
    building.drop_old_objects()
    folder = tmp_path_factory.mktemp("native")

    @cache
    def program_of(program: str, sanitizer: str) -> Path:
        return building.link(folder / f"{sanitizer}-{program}", sources_of(program), SANITIZERS[sanitizer])

    return program_of


def holds(build: Build, program: str, claim: str, sanitizer: str) -> None:
    result = run([build(program, sanitizer), claim], 150)
    assert result.returncode == 0, result.stdout + result.stderr
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
    options = ("-std=c++20", f"-I{HERE}", *building.MEMORY.options)
    assert run([building.compiler(), *options, source, "-o", binary], 110).returncode == 0
    assert run([binary, "one is one"], 60).returncode == 0
    assert run([binary, "one is two"], 60).returncode == 1
    assert run([binary, "a byte past the end is ours"], 60).returncode != 0
    assert run([binary, "no such sentence"], 60).returncode == 1
