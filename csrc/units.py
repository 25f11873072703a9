"""For setup.py: how long each unit (a source, by its path from the root) takes to compile, and how well."""

from __future__ import annotations

import time
from collections.abc import Iterable

# Set-up, probes, errors and conversions: nobody waits for these, so they are compiled in less time.
COLD = (
    *("bindings/", "c_api/", "common/", "layout/", "backend/gpu/", "gpu/", "engine/config.cc", "engine/stats.cc"),
    *(f"engine/group/{name}.cc" for name in ("choice", "control_plane", "stats")),
    "engine/host/stats.cc",
    *(f"engine/gpu/{name}.cc" for name in ("checks", "engine", "faults", "network", "trace", "trial")),
    *(f"transport/{name}.cc" for name in ("nics", "registry", "trial")),
    *(f"transport/ofi/{name}.cc" for name in ("endpoint", "library", "provider")),
    *(f"transport/verbs/{name}.cc" for name in ("library", "nic")),
)
# Processor seconds of what takes longest.
LONGEST = {
    "backend/gpu/dispatch.cu": 65.0,
    "backend/gpu/combine.cu": 45.0,
    "bindings/module.cc": 13.0,
    "bindings/gpu.cc": 10.0,
    "backend/gpu/queue_probe.cu": 6.0,
    "backend/gpu/clock.cu": 4.0,
}
OTHERS = 2.0  # of every other one


def is_cold(source: str) -> bool:
    return source.removeprefix("csrc/").startswith(COLD)


def seconds_of(source: str) -> float:
    return LONGEST.get(source.removeprefix("csrc/"), OTHERS)


def longest_first(sources: Iterable[str]) -> list[str]:
    """In this order no core idles at the end."""
    return sorted(sources, key=lambda source: (-seconds_of(source), source))


class Progress:
    """How many are compiled, and how long the others will take by what those took."""

    def __init__(self, sources: list[str]) -> None:
        self._sources = sources
        self._done: list[str] = []
        self._started = time.monotonic()

    def done(self, source: str) -> str:
        self._done.append(source)
        whole, done = (sum(map(seconds_of, which)) for which in (self._sources, self._done))
        left_s = (time.monotonic() - self._started) * (whole - done) / done
        return f"compiled {len(self._done)} of {len(self._sources)}, about {left_s:.0f} s left"

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started
