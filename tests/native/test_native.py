"""Runs the claims of the native programs, most of which are compiled with sanitizers: one case per claim."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.native import building
from tests.native.building import PARTS, run
from tests.native.mutants import MUTANTS

HERE = Path(__file__).resolve().parent
OF_TRANSPORTS = ("verbs", "verbs_datagram", "verbs_event", "verbs_engine", "ofi", "ofi_fault")
# Kernels on the stand-in for GPUs: docs/gpu_on_cpu.md.
ON_CPU = (
    "lanes", "events", "gpu_routing", "gpu_engine", "gpu_engine_refusal", "gpu_close", "gpu_ranks",
    "low_latency", "low_latency_masks", "slot_weights", "pause_engine", "topk", "gpu_time",
)  # fmt: skip
PROGRAMS = (
    "queue", "words", "layout", "messages", "loop", "ready", "mail", "copier", "nics", "stream", "fault",
    "life", "device", "board", "agreement", "slot_engine", "slot_engine_stepped", "engine", "engine_stepped",
    "engine_setup", "engine_memory", "gpu", "gpu_windows", "packets", "guess", *ON_CPU, *OF_TRANSPORTS,
)  # fmt: skip
# Where threads meet without a lock: these run under TSan every time, the others with -m slow.
LOCK_FREE = ("queue", "stream", "copier", "ready")
LARGE = (  # 13 GB of memory, or minutes
    "regions of more than 4 GiB give what small ones give",
    "129 ranks in 16 domains of 8 and one of 1 have the host's bits",
    "ranks are masked in groups of more ranks than a word has bits",
    "ranks are masked in groups of more than 64 ranks",
)
# What a claim prints that cannot be tried here.
SKIPPED = "skipped: "
# Libraries that NICs come with, as the stand-in bears them.
STAND_INS = ("libibverbs.so.1", "libefa.so.1")
ENGINE_PARTS = (*PARTS, "backend", "engine")
SANITIZERS = {"memory": building.MEMORY, "thread": building.THREAD}
# Claims of a NIC that writes while a thread reads: nothing orders these writes, which are threads' here.
UNORDERED = (
    "1,000 chunks through a ring of 2 arrive intact when writes are duplicated",
    "1,000 chunks through a ring of 2 arrive intact under all faults at once, with three readers",
    "a sender that ignores credits is stopped by the receiver, with an error on both sides",
    "without credits on both sides the slow reader would find overwritten chunks",
    "slots of uneven domains, and of one rank each, have every token when writes are duplicated",
)
CLAIM = re.compile(r'^CLAIM\("((?:[^"\\]|\\.)*)"\)', re.MULTILINE)

Build = Callable[[str, str], Path]


def claims_of(program: str) -> list[str]:
    text = (HERE / f"{program}_claims.cc").read_text()
    claims = CLAIM.findall(text)
    if len(claims) != len(re.findall(r"^CLAIM\(", text, re.MULTILINE)):
        raise ValueError(f"{program}_claims.cc: each CLAIM needs its name on its own line, in one string")
    return claims


def cases(sanitizer: str) -> list[object]:
    slow = [pytest.mark.slow] if sanitizer == "thread" else []
    # A GPU's data races are not a CPU's.
    programs = PROGRAMS if sanitizer == "memory" else [name for name in PROGRAMS if name not in ON_CPU]
    return [
        pytest.param(
            program,
            claim,
            id=f"{program}: {claim}",
            marks=pytest.mark.slow if claim in LARGE else [] if program in LOCK_FREE else slow,
        )
        for program in programs
        for claim in claims_of(program)
        if sanitizer == "memory" or claim not in UNORDERED
    ]


def sources_of(program: str) -> list[Path]:
    if program in ("lanes", "gpu_routing"):
        return [HERE / f"{program}_claims.cc", *building.GPU_ON_CPU.glob("*.cc")]
    if program == "events":  # of a proxy, only what publishes them
        parts = [building.CSRC / "proxy" / "board.cc", *building.product_sources(("common", "layout"))]
        return [HERE / "events_claims.cc", *parts, *building.GPU_ON_CPU.glob("*.cc")]
    if program == "agreement":
        return [HERE / "agreement_claims.cc", building.CSRC / "backend" / "host" / "agreement.cc"]
    if program == "topk":
        product = [path for path in building.gpu_sources() if path.name in ("topk.cu", "runtime.cc")]
        return [HERE / "topk_claims.cc", *product, *building.GPU_ON_CPU.glob("*.cc")]
    product = building.product_sources(ENGINE_PARTS if "engine" in program or program in ON_CPU else PARTS)
    if program in ("gpu", "gpu_windows", "guess"):  # what of it needs no GPU
        names = ("arrays.cc", "layout.cc", "layout_parts.cc")
        product += [building.CSRC / "backend" / "gpu" / name for name in names]
    if program == "words":
        product.append(building.CSRC / "backend" / "plan.cc")
    if program in ON_CPU:
        product += building.gpu_sources()
    if program == "gpu_time":
        product.append(HERE / "taking_turns.cc")
    return [HERE / f"{program}_claims.cc", *product]


def flavour_of(program: str, sanitizer: str) -> building.Flavour:
    # Groups of 65 ranks take four times as long with AddressSanitizer.
    return building.PLAIN if program == "gpu_ranks" else SANITIZERS[sanitizer]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Links a program once per session and sanitizer."""
    if building.shutil.which("g++") is None:
        pytest.skip("g++ is not on the path")
    building.drop_old_objects()
    folder = tmp_path_factory.mktemp("native")

    @cache
    def program_of(program: str, sanitizer: str) -> Path:
        binary = folder / sanitizer / program / "claims"
        binary.parent.mkdir(parents=True, exist_ok=True)  # it is there if an earlier claim could not be built
        if program.startswith("verbs"):
            building.link_shared(binary.with_name(STAND_INS[0]), HERE / "fake_verbs.cc")
            for name in STAND_INS[1:]:
                binary.with_name(name).symlink_to(STAND_INS[0])
        return building.link(binary, sources_of(program), flavour_of(program, sanitizer))

    return program_of


def holds(build: Build, program: str, claim: str, sanitizer: str, timeout: float = 150) -> None:
    binary = build(program, sanitizer)
    result = run([binary, claim], timeout, libraries=binary.parent)
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
    assert run([build(program, "memory"), "--list"], 60).stdout.splitlines() == claims_of(program)


# Orders and data of each claim, beside the one of every run.
SWEEP = "UCCL_EP_CUDA_SEEDS", "100:12"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("claim", [claim for claim in claims_of("gpu_engine") if "host's bits" in claim])
def test_many_orders(build: Build, claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*SWEEP)
    holds(build, "gpu_engine", claim, "memory", timeout=900)


def mutated(name: str, right: str, wrong: str) -> str:
    """A file, by its path from csrc/backend/gpu, with a mistake in the one place that says `right`."""
    text = (building.CSRC / "backend" / "gpu" / name).read_text()
    assert text.count(right) == 1 and right != wrong
    return text.replace(right, wrong)


def broken_program(
    folder: Path, flavour: building.Flavour, mistake: Sequence[str], program: str = "gpu_engine"
) -> Path:
    """The program with such a mistake."""
    name, right, wrong = mistake
    csrc = building.shutil.copytree(building.CSRC, folder / "csrc")
    broken = (csrc / "backend" / "gpu" / name).resolve()
    broken.write_text(mutated(name, right, wrong))
    copies = [(path, csrc / os.path.relpath(path, building.CSRC)) for path in sources_of(program)]
    sources = [copy if copy.suffix == ".cu" or copy == broken else path for path, copy in copies]
    # Kernels are compiled with claims that call their functions.
    with_kernels = b'.cuh"' in (HERE / f"{program}_claims.cc").read_bytes()
    return building.link(folder / "claims", sources, flavour, csrc if with_kernels else building.CSRC)


ALL_MUTANTS = [(program, mutant) for program, mutants in MUTANTS.items() for mutant in mutants]


@pytest.mark.parametrize(("program", "mutant"), ALL_MUTANTS)
def test_a_mutant_names_one_place_of_the_kernels(program: str, mutant: str) -> None:
    assert mutated(*MUTANTS[program][mutant][1:])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("program", "mutant"), ALL_MUTANTS)
def test_a_broken_kernel_is_found(
    tmp_path: Path, program: str, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: bits that are compared, and lanes that are watched."""
    claim, *mistake = MUTANTS[program][mutant]
    monkeypatch.setenv(*SWEEP)
    binary = broken_program(tmp_path, building.PLAIN, mistake, program)
    result = run([binary, claim], 150)
    assert result.returncode != 0, result.stdout


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
    options = ("-std=c++20", f"-I{HERE}", *building.THREAD.options, "-pthread")
    assert run([building.compiler(), *options, source, "-o", binary], 110).returncode == 0
    result = run([binary, "it is ours"], 60)
    assert result.returncode != 0 and "data race" in result.stderr, result.stderr
