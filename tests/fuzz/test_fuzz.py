"""What comes from outside the process is fed to its readers at random. They take it, or raise typed errors.

Each `*.cc` here but the driver is a target, `corpus` has its seeds. g++ builds it with ASan, UBSan and a
small driver that keeps what reaches new branches; where clang is installed libFuzzer drives it, too. A failed
test prints the input that ended the target, in Base64: decoded into a file it is a new seed.
"""

from __future__ import annotations

import base64
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.native.building import CSRC, FLAGS, MEMORY, Flavour, compiled, compiler, run

HERE = Path(__file__).resolve().parent
TARGETS = sorted(path.stem for path in HERE.glob("*.cc") if path.stem != "driver")
# What targets that include lone_proxy.h link.
PROXY = tuple(sorted([*(CSRC / "proxy").glob("*.cc"), *(CSRC / "layout").glob("*.cc")]))

GXX = replace(MEMORY, name="fuzz", options=(*MEMORY.options, "-fsanitize-coverage=trace-pc"))
CLANG = Flavour(
    name="libfuzzer",
    options=("-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"),
    compiler="clang++",
)
FOUND = 86  # what a program that a sanitizer or a claim ended returns
SECONDS = 2.0
LIBFUZZER_SECONDS = 3
LONG_SECONDS = 120


def sources_of(target: str) -> tuple[Path, ...]:
    """Without a driver."""
    source = HERE / f"{target}.cc"
    return (source, *(PROXY if '"lone_proxy.h"' in source.read_text() else ()))


def objects_of(sources: Sequence[Path], flavour: Flavour) -> list[Path]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda source: compiled(source, flavour, (CSRC, HERE)), sources))


def built(target: str, folder: Path) -> Path:
    """The target with the small driver."""
    objects = objects_of([HERE / "driver.cc"], MEMORY)
    objects += objects_of(sources_of(target), GXX)
    return linked(objects, folder / target, MEMORY)


def linked(objects: Sequence[Path], program: Path, flavour: Flavour) -> Path:
    result = run([compiler(flavour.compiler), *flavour.options, *objects, "-o", program, "-pthread"], 300)
    assert result.returncode == 0, result.stderr
    return program


def drive(program: Path, seconds: float, seed: int) -> subprocess.CompletedProcess[str]:
    crash = program.with_suffix(".crash")
    corpus = HERE / "corpus" / program.stem
    return run([program, corpus, str(seconds), str(seed), crash], seconds + 60)


def finding(program: Path, result: subprocess.CompletedProcess[str]) -> str:
    """What a failed test prints."""
    crash = program.with_suffix(".crash")
    shown = base64.b64encode(crash.read_bytes()).decode() if crash.exists() else "none"
    return f"{result.stdout}{result.stderr[-4000:]}\ninput in Base64: {shown}"


def a_seed() -> int:
    return 1 if os.environ.get("CI") else random.randrange(1 << 32)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_breaks_the_reader(target: str, tmp_path: Path) -> None:
    program = built(target, tmp_path)
    seed = a_seed()
    result = drive(program, SECONDS, seed)
    assert result.returncode == 0, f"seed {seed}\n{finding(program, result)}"
    assert result.stdout.startswith("ok: "), result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_breaks_the_reader_for_minutes(target: str, tmp_path: Path) -> None:
    program = built(target, tmp_path)
    seed = random.randrange(1 << 32)
    result = drive(program, LONG_SECONDS, seed)
    assert result.returncode == 0, f"seed {seed}\n{finding(program, result)}"


# -------------------------------------------------------------------------------- libFuzzer


def has_libfuzzer(folder: Path) -> bool:
    """clang, and the runtime that Debian packages apart from it."""
    (folder / "empty.cc").write_text(
        '#include <cstddef>\nextern "C" int LLVMFuzzerTestOneInput(const char*, size_t) { return 0; }\n'
    )
    return (
        run(
            ["clang++", "-std=c++20", *CLANG.options, folder / "empty.cc", "-o", folder / "empty"], 120
        ).returncode
        == 0
    )


@pytest.fixture(scope="session")
def libfuzzer(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not on the path (Debian packages: clang, libclang-rt-dev)")
    if not has_libfuzzer(tmp_path_factory.mktemp("libfuzzer")):
        pytest.skip("clang++ has no libFuzzer (Debian package: libclang-rt-dev)")


def fuzz_by_clang(target: str, folder: Path, seconds: int) -> None:
    program = linked(objects_of(sources_of(target), CLANG), folder / target, CLANG)
    found, corpus = folder / "found", HERE / "corpus" / target
    found.mkdir()
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", f"-artifact_prefix={folder}/"]
    result = run([program, *options, found, corpus], seconds + 120)
    crashes = [
        base64.b64encode(path.read_bytes()).decode()
        for path in folder.glob("*-*")
        if path.name.startswith(("crash-", "timeout-", "leak-", "oom-"))
    ]
    assert result.returncode == 0, f"{result.stderr[-4000:]}\ninputs in Base64: {crashes}"
    assert "stat::number_of_executed_units" in result.stderr or "Done " in result.stderr, result.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_libfuzzer_finds_nothing(libfuzzer: None, target: str, tmp_path: Path) -> None:
    fuzz_by_clang(target, tmp_path, LIBFUZZER_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_libfuzzer_finds_nothing_for_minutes(libfuzzer: None, target: str, tmp_path: Path) -> None:
    fuzz_by_clang(target, tmp_path, LONG_SECONDS)


# -------------------------------------------------------------------------------- negative controls


@dataclass(frozen=True)
class Mutant:
    """A check that a reader leaves out: `old` in one of the product's files, and what is there instead."""

    target: str
    file: str
    old: str
    new: str
    finds: str  # part of what ends the target

    def __str__(self) -> str:
        return f"{self.target}: {self.finds}"


LOOP, VERBS, OFI = (f"transport/{name}/address.h" for name in ("loop", "verbs", "ofi"))
LANDER, SHIPPER, HEALTH = "proxy/lander.cc", "proxy/shipper.cc", "proxy/health.cc"
MESSAGES = "proxy/messages.cc"
NO_ZERO = " || field.find('\\0') != std::string::npos"
OUT_OF_BOUNDS = "AddressSanitizer"

MUTANTS = (
    Mutant("loop_address", LOOP, " || encode_address(a) != text", "", "one address"),
    Mutant("verbs_address", VERBS, " || encode_address(a) != text", "", "one address"),
    Mutant("verbs_address", VERBS, "m.num_bytes != 0 : m.stride", "false : m.stride", "zero"),
    Mutant("verbs_address", VERBS, " || n.lid > kMostLid", "", "a LID fits"),
    Mutant("verbs_address", VERBS, "pair.rail <= pairs.back().rail", "false", "a rail finds its queue pair"),
    Mutant("ofi_address", OFI, " || encode_address(a) != text", "", "one address"),
    Mutant("ofi_address", OFI, "if (!consistent) return false;", "", OUT_OF_BOUNDS),
    Mutant("handles", "engine/group/handle.h", "bytes_.size() - at_ < size)", "false)", OUT_OF_BOUNDS),
    Mutant("handles", "engine/group/handle.h", NO_ZERO, "", "a name is whole"),
    Mutant(
        "handles",
        "engine/group/handle.h",
        "!h.fabric.empty() && h.fabric.size()",
        "false && h.fabric.size()",
        "a fabric handle is whole",
    ),
    Mutant(
        "handles", "engine/group/handle.h", "offer.nonce.size() != kNonceBytes", "false", "a nonce is whole"
    ),
    Mutant("immediates", LANDER, "imm.channel >= channels_.size() || ", "", OUT_OF_BOUNDS),
    Mutant("immediates", LANDER, "stamp.own() != lap_before", "false", "skips no lap"),
    Mutant("immediates", SHIPPER, "if (index >= channels_.size() || ", "if (", OUT_OF_BOUNDS),
    Mutant("immediates", "proxy/proxy.cc", "completion.peer < 0 || ", "", OUT_OF_BOUNDS),
    Mutant("datagrams", HEALTH, "record.step > Step::kClose", "false", "an error has a step"),
    Mutant("datagrams", HEALTH, "make_printable(record.message);", "", "an error is printable"),
    Mutant("datagrams", MESSAGES, " || !peers_[header.sender].known", "", OUT_OF_BOUNDS),
    Mutant(
        "datagrams", MESSAGES, "if (header.serial <= newest) {", "if (false) {", "a message is taken once"
    ),
    Mutant("datagrams", MESSAGES, "header.serial == composed_[header.kind].serial", "true", "all have"),
    Mutant("commands", SHIPPER, "command.channel >= channels_.size()", "false", OUT_OF_BOUNDS),
    Mutant("commands", SHIPPER, "command.num_bytes > send.slot_bytes", "false", "a write"),
    Mutant("commands", "queue/ring.h", " || (words.word[1] & kCommandPhase) != phase", "", "a torn command"),
)


def mutated(mutant: Mutant, folder: Path) -> Path:
    """The target with one file of the product changed."""
    text = (CSRC / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} does not say {mutant.old!r} once"
    changed = folder / "changed" / mutant.file
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace(mutant.old, mutant.new))
    target = HERE / f"{mutant.target}.cc"
    # A header is changed for the target alone: that is where its code is.
    anew = target if changed.suffix == ".h" else changed
    obj = folder / "changed.o"
    includes = [f"-I{path}" for path in (folder / "changed", CSRC, HERE)]
    result = run([compiler(), *FLAGS, *GXX.options, "-Wno-error", *includes, "-c", anew, "-o", obj], 300)
    assert result.returncode == 0, result.stderr
    others = [path for path in sources_of(mutant.target) if path not in (anew, CSRC / mutant.file)]
    objects = [obj, *objects_of([HERE / "driver.cc"], MEMORY), *objects_of(others, GXX)]
    return linked(objects, folder / mutant.target, MEMORY)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_reader_without_its_check_is_broken(mutant: Mutant, tmp_path: Path) -> None:
    program = mutated(mutant, tmp_path)
    result = drive(program, 30, seed=1)
    assert result.returncode == FOUND, result.stdout
    assert mutant.finds in result.stderr, result.stderr
    # What ended it was kept, and ends it again.
    again = run([program, program.with_suffix(".crash")], 60)
    assert again.returncode == FOUND and mutant.finds in again.stderr, again.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_seeds_and_a_mutant(target: str) -> None:
    seeds = [path.name for path in (HERE / "corpus" / target).iterdir()]
    assert any(name.startswith("valid") for name in seeds), seeds
    assert any(mutant.target == target for mutant in MUTANTS)
