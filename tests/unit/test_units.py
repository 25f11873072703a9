"""What setup.py knows of its units: in which order they compile, how well, and how long it still takes."""

from __future__ import annotations

import re
import runpy
import time
from pathlib import Path

import pytest

from tests.compile_time import Yardstick, verdict

ROOT = Path(__file__).resolve().parents[2]
UNITS = runpy.run_path(str(ROOT / "csrc" / "units.py"), run_name="units")
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.c[cu]"))


def unknown(names: list[str], sources: list[str]) -> list[str]:
    """Of `names`, below csrc, those that no source begins with."""
    return [name for name in names if not any(source.startswith(f"csrc/{name}") for source in sources)]


def test_every_unit_that_is_named_exists() -> None:
    names = [*UNITS["COLD"], *UNITS["LONGEST"]]
    assert len(names) > 10
    assert unknown(names, SOURCES) == []


def test_a_name_without_a_source_is_found() -> None:
    """Control."""
    assert unknown(["layout/", "layout/gone.cc"], SOURCES) == ["layout/gone.cc"]


HOT = (
    "backend/host/",
    "backend/plan.cc",
    "proxy/",
    "engine/host/run.cc",
    "engine/gpu/ops.cc",
    "transport/loop/",
)


def test_what_operations_wait_for_is_not_cold() -> None:
    hot = [source for source in SOURCES if source.removeprefix("csrc/").startswith(HOT)]
    assert len(hot) > 12
    assert not [source for source in hot if UNITS["is_cold"](source)]
    assert UNITS["is_cold"]("csrc/bindings/module.cc")


def test_the_longest_units_begin_first_whatever_compiles_them() -> None:
    given = ["csrc/proxy/proxy.cc", "csrc/bindings/module.cc", "csrc/backend/gpu/clock.cu"]
    given += ["csrc/engine/host/run.cc", "csrc/backend/gpu/dispatch.cu"]
    assert UNITS["longest_first"](given) == [given[4], given[1], given[2], given[3], given[0]]


def test_progress_says_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    others = ["csrc/engine/host/run.cc", "csrc/proxy/proxy.cc"]
    progress = UNITS["Progress"](["csrc/bindings/module.cc", *others])
    of_others, of_module = UNITS["OTHERS"], UNITS["LONGEST"]["bindings/module.cc"]
    now[0] += 10
    left = 10 * (of_module + of_others) / of_others
    assert progress.done(others[0]) == f"compiled 1 of 3, about {left:.0f} s left"
    now[0] += 20
    left = 30 * of_others / (of_module + of_others)
    assert progress.done("csrc/bindings/module.cc") == f"compiled 2 of 3, about {left:.0f} s left"
    assert progress.done(others[1]) == "compiled 3 of 3, about 0 s left"


def texts_of(source: str) -> str:
    """A source with all of our headers that it includes."""
    waiting, seen = [ROOT / source], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        waiting += [ROOT / "csrc" / name for name in re.findall(r'#include "([^"]+)"', path.read_text())]
    return "".join(path.read_text() for path in seen)


def test_units_that_builds_with_and_without_kernels_share_do_not_see_which_it_is() -> None:
    sees = {source for source in SOURCES if "UCCL_EP_CUDA" in texts_of(source)}
    assert {f"csrc/{name}" for name in UNITS["CHOOSING"]} <= sees
    assert [source for source in sorted(sees) if not UNITS["sees_gpus"](source)] == []
    assert sum(not UNITS["sees_gpus"](source) for source in SOURCES) > 50


@pytest.mark.parametrize(("changes", "good"), [
    ({}, True), ({"cpu_s": 200.5}, False), ({"compiled": 39}, False), ({"shared": 1}, False),
    ({"wall_s": 999.0}, True),
])  # fmt: skip
@pytest.mark.parametrize("slowness", [1.0, 2.0])
def test_ci_passes_a_whole_build_within_its_limit_and_nothing_else(
    changes: dict[str, float], good: bool, slowness: float
) -> None:
    report = {"units": 40, "compiled": 40, "shared": 0, "wall_s": 95.0, "cpu_s": 200.0} | changes
    report["cpu_s"] *= slowness
    found, text = verdict(report, 5.0 * slowness, 40.0)
    assert found == good, text


def test_the_yardstick_of_compile_times_is_compiled_beside_a_command() -> None:
    with Yardstick() as yardstick:
        time.sleep(0.1)
    assert 0.5 < yardstick.seconds < 60
