"""Warps of 32 or 64 lanes, free or in lock step: claims of kernels, and mistakes that only these find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.native import building
from tests.native.building import MEMORY, PLAIN, Flavour, run
from tests.native.test_native import LARGE, SWEEP, broken_program, claims_of, mutated, sources_of

# Beside free lanes, 32 to a warp, which test_native.py has. What every run compiles has no sanitizer.
MODES = {
    "32 lanes in lock step": replace(MEMORY, lanes=32, wave=32),
    "64 lanes": replace(MEMORY, lanes=64, wave=1),
    "64 lanes in lock step": replace(PLAIN, lanes=64, wave=64),
}
SEVERAL_RANKS = "2 domains of 2 ranks have the host's bits, FP8"
SEVERAL_DOMAINS = "4 domains of a rank have the host's bits"
ONE_DOMAIN = "2 ranks of a domain have the host's bits, BF16"
SLOTS = "ranks of several domains get every row in its slot, and every sum"
FOLDED = "2 ranks get every row in its slot, and every sum"
KNOWN = "weights that came with the routing give the same sums, by bulk copies, plain loads, or pairs"
# In every run; the others with -m slow.
CHOSEN = {
    "32 lanes in lock step": (),
    "64 lanes": (),
    "64 lanes in lock step": (SEVERAL_RANKS, SEVERAL_DOMAINS, ONE_DOMAIN, SLOTS, FOLDED, KNOWN),
}
WHOLE = ("lanes", "events", "gpu_routing")  # all of their claims, where a mode has any
OTHERS = ("gpu_engine", "gpu_engine_refusal", "gpu_close", "gpu_ranks", "low_latency", "slot_weights")
REGIONS = "regions of more than 4 GiB give what small ones give"  # lanes are nothing to it

Build = Callable[[str, str], Path]


def cases() -> list[object]:
    return [
        pytest.param(
            mode,
            program,
            claim,
            id=f"{mode}, {program}: {claim}",
            marks=[] if CHOSEN[mode] and (program in WHOLE or claim in CHOSEN[mode]) else pytest.mark.slow,
        )
        for mode in MODES
        for program in (*WHOLE, *OTHERS)
        for claim in claims_of(program)
        if claim != REGIONS
    ]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Links a program once per session and mode."""
    if building.shutil.which("g++") is None:
        pytest.skip("g++ is not on the path")
    folder = tmp_path_factory.mktemp("lanes")

    @cache
    def program_of(program: str, mode: str) -> Path:
        return building.link(folder / f"{program}, {mode}", sources_of(program), MODES[mode])

    return program_of


# The first case of a mode waits for the compiler.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("mode", "program", "claim"), cases())
def test_claim(build: Build, mode: str, program: str, claim: str) -> None:
    result = run([build(program, mode), claim], 400 if claim in LARGE else 150)
    assert result.returncode == 0 and result.stdout.startswith("ok: "), result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("claim", [claim for claim in claims_of("gpu_engine") if "host's bits" in claim])
def test_many_orders(build: Build, mode: str, claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*SWEEP)
    result = run([build("gpu_engine", mode), claim], 900)
    assert result.returncode == 0, result.stdout + result.stderr


STANDS = "stand still"  # what the fault of a wave that waits for itself says


@pytest.mark.timeout(300)
def test_two_warps_of_a_wave_cannot_wait_for_each_other(tmp_path: Path) -> None:
    """Negative control of lock step: a wave is two warps of 32 lanes."""
    binary = building.link(tmp_path / "claims", sources_of("lanes"), replace(MEMORY, wave=64))
    assert run([binary, "a lane may wait for one of another wave"], 60).returncode == 1
    assert (
        run([binary, "what a lane publishes before a __syncwarp its wave may wait for"], 60).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_roles_cannot_share_a_wave(tmp_path: Path) -> None:
    """One ends the kernel when the other is through (`EndReturnsRole`)."""
    binary = building.link(tmp_path / "claims", sources_of("gpu_engine"), replace(MEMORY, wave=64))
    result = run([binary, SEVERAL_RANKS], 150)
    assert result.returncode != 0 and STANDS in result.stderr, result.stdout + result.stderr


HEADERS = "  __syncwarp();  // lanes of this warp will wait for what"
PACKETS = "  __syncwarp();  // lanes of this warp will wait for other ranks"
ADOPTED = "    __syncwarp();  // lanes of this warp will wait for it"
SENT = "  __syncwarp();  // other lanes of this warp may wait"
# (mode, a claim that does not hold, what is said, file of csrc/backend/gpu, its text, a mutant's)
MUTANTS: dict[str, tuple[Flavour, str, str, str, str, str]] = {
    "lanes wait for headers that others of their wave have not published": (
        MODES["64 lanes in lock step"], SEVERAL_RANKS, STANDS, "device.cuh", HEADERS, HEADERS[16:],
    ),
    "lanes wait for other ranks before one of their wave has told of the packets": (
        MODES["64 lanes in lock step"], SEVERAL_RANKS, STANDS, "net.cuh", PACKETS, PACKETS[16:],
    ),
    "lanes wait for a routing that others of their wave have not told of": (
        MODES["64 lanes in lock step"], SLOTS, STANDS, "low_latency_net.cuh", ADOPTED, ADOPTED[18:],
    ),
    "lanes wait for what another of their wave has not told yet": (
        MODES["64 lanes in lock step"], FOLDED, STANDS, "low_latency.cuh", SENT, SENT[16:],
    ),
    "a vote is cut to 32 lanes": (
        MODES["64 lanes"], ONE_DOMAIN, "", "tile.cuh",
        "Mask{ballot(numbers[u] != 0)}", "Mask{static_cast<uint32_t>(ballot(numbers[u] != 0))}",
    ),
    "lanes beyond the places of a row count chunks": (
        MODES["64 lanes"], SEVERAL_RANKS, "AddressSanitizer", "stage.cuh",
        "if (k.crew.lane() < outs.num_places)", "if (k.crew.lane() < 2 * kMostPlaces)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_names_one_place_of_the_kernels(mutant: str) -> None:
    assert mutated(*MUTANTS[mutant][3:])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_kernel_is_found(tmp_path: Path, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flavour, claim, said, *mistake = MUTANTS[mutant]
    monkeypatch.setenv(*SWEEP)
    program = "low_latency" if claim in (SLOTS, FOLDED) else "gpu_engine"
    result = run([broken_program(tmp_path, flavour, mistake, program), claim], 300)
    assert result.returncode != 0 and said in result.stdout + result.stderr, result.stdout
