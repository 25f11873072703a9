"""Runs the claims of the native programs, which are compiled with sanitizers: one case per claim."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tests.native.objects import CSRC, SANITIZERS, compiled, compiler, forget_old_objects, options_for, run

HERE = Path(__file__).resolve().parent
PROGRAMS = ("queue", "layout", "loop", "stream", "fault", "life", "device", "engine", "cuda")
# Where threads meet without a lock: these run under TSan every time, the others with -m slow.
LOCK_FREE = ("queue", "stream")
# The product's own sources that the programs link.
PARTS = ("common", "layout", "transport", "proxy")
ENGINE_PARTS = (*PARTS, "backend", "engine")
CLAIM = re.compile(r'^CLAIM\("((?:[^"\\]|\\.)*)"\)', re.MULTILINE)

Build = Callable[[str, str], Path]


def claims_of(program: str) -> list[str]:
    return CLAIM.findall((HERE / f"{program}_claims.cc").read_text())


def cases(sanitizer: str) -> list[object]:
    slow = [pytest.mark.slow] if sanitizer == "thread" else []
    return [
        pytest.param(program, claim, id=f"{program}: {claim}", marks=[] if program in LOCK_FREE else slow)
        for program in PROGRAMS
        for claim in claims_of(program)
    ]


def sources_of(program: str) -> list[Path]:
    parts = ENGINE_PARTS if program == "engine" else PARTS
    product = [path for part in parts for path in (CSRC / part).rglob("*.cc") if "cuda" not in path.parts]
    if program == "cuda":  # what of it needs no CUDA
        product.append(CSRC / "backend" / "cuda" / "layout.cc")
    return [HERE / f"{program}_claims.cc", *sorted(product)]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Links a program once per session and sanitizer."""
    forget_old_objects()
    folder = tmp_path_factory.mktemp("native")

    @cache
    def program_of(program: str, sanitizer: str) -> Path:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            options = options_for(sanitizer)
            objects = list(
                pool.map(lambda source: compiled(source, options, (CSRC, HERE)), sources_of(program))
            )
        binary = folder / f"{sanitizer}-{program}"
        linked = (f"-fsanitize={SANITIZERS[sanitizer]}", "-pthread", "-lrt")
        result = run([compiler(), *objects, "-o", binary, *linked], 300)
        assert result.returncode == 0, result.stderr
        return binary

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
    options = ("-std=c++20", f"-I{HERE}", f"-fsanitize={SANITIZERS['memory']}")
    assert run([compiler(), *options, source, "-o", binary], 110).returncode == 0
    assert run([binary, "one is one"], 60).returncode == 0
    assert run([binary, "one is two"], 60).returncode == 1
    assert run([binary, "a byte past the end is ours"], 60).returncode != 0
    assert run([binary, "no such sentence"], 60).returncode == 1


def test_a_data_race_is_found(tmp_path: Path) -> None:
    """Negative control: two threads write a plain number."""
    source = tmp_path / "race_claims.cc"
    source.write_text(
        '#include "claims.h"\n#include <thread>\n'
        "static long shared = 0;\n"
        "static void count() { for (int i = 0; i < 1000; ++i) ++shared; }\n"
        'CLAIM("it is ours") { std::thread other(count); count(); other.join(); EXPECT(shared >= 0); }\n'
        "int main(int argc, char** argv) { return claims::main(argc, argv); }\n"
    )
    binary = tmp_path / "race"
    options = (*options_for("thread"), f"-I{HERE}", "-pthread")
    assert run([compiler(), *options, source, "-o", binary], 110).returncode == 0
    result = run([binary, "it is ours"], 60)
    assert result.returncode != 0 and "data race" in result.stderr, result.stderr
