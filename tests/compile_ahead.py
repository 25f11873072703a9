"""Compiles what the default tests compile, so that they find it done: python -m tests.compile_ahead

For CI, beside what leaves a core idle. Objects are named by what they are made of (tests/native/building.py),
so what is forgotten here or has changed since is compiled by its test, and nothing stale is ever used.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial

from tests.conformance.build import build as build_conformance
from tests.fuzz import test_fuzz
from tests.native import building, kernels, test_lanes, test_native

Job = Callable[[], object]


def jobs() -> dict[str, Job]:
    """In the order of the tests."""
    found: dict[str, Job] = {"conformance": partial(build_conformance, building.MEMORY)}
    clang = [test_fuzz.CLANG] if shutil.which(test_fuzz.CLANG.compiler) is not None else []
    for target in test_fuzz.TARGETS:
        for flavour in (test_fuzz.GXX, *clang):
            needed = test_fuzz.sources_of(target)
            found[f"{flavour.name} {target}"] = partial(test_fuzz.objects_of, needed, flavour)
    for program in test_native.PROGRAMS:
        for sanitizer in ("memory", "thread") if program in test_native.LOCK_FREE else ("memory",):
            sources, flavour = test_native.sources_of(program), test_native.flavour_of(program, sanitizer)
            found[f"{program}, {sanitizer}"] = partial(building.objects_of, sources, flavour)
    for mode in filter(test_lanes.CHOSEN.get, test_lanes.MODES):
        sources, flavour = test_native.sources_of("gpu_engine"), test_lanes.MODES[mode]
        found[f"gpu_engine, {mode}"] = partial(building.objects_of, sources, flavour)
    for source in kernels.SOURCES:
        for architecture in kernels.known():
            if kernels.is_chosen(source, architecture):
                found[f"{source.stem}, sm_{architecture}"] = partial(kernels.report_of, source, architecture)
    return found


if __name__ == "__main__":
    for name, job in jobs().items():
        since = time.monotonic()
        try:
            job()
        except building.CannotBuild as error:  # its test says so, too
            print(f"{name}: {error}", flush=True)
        print(f"{name}: {time.monotonic() - since:.1f} s", flush=True)
