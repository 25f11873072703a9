"""For setup.py: how long each unit takes to compile, and which units need less optimisation.

A unit is a source, named by its path from the root.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import PurePath

# Set-up, probes, errors and conversions: their speed does not matter, so they are compiled in less time.
COLD = (
    *("bindings/", "c_api/", "common/", "layout/", "backend/gpu/", "gpu/"),
    *("engine/config.cc", "engine/stats.cc"),
    *(f"engine/group/{name}.cc" for name in ("choice", "close", "control_plane", "domains")),
    *(f"engine/group/{name}.cc" for name in ("errors", "setup", "stats", "trace")),
    *(f"engine/host/{name}.cc" for name in ("combine", "dispatch", "engine", "slots", "stats")),
    *(f"engine/gpu/{name}.cc" for name in ("checks", "close", "engine", "faults", "low_latency", "network")),
    *(f"engine/gpu/{name}.cc" for name in ("trace", "trial")),
    *(f"transport/{name}.cc" for name in ("nics", "registry", "trial")),
    *(f"transport/ofi/{name}.cc" for name in ("datagrams", "endpoint", "library", "provider")),
    *(f"transport/verbs/{name}.cc" for name in ("datagrams", "library", "nic")),
)
# They choose a backend. With those in folders of GPUs they are the only units that see `UCCL_EP_CUDA`.
CHOOSING = ("bindings/module.cc", "c_api/convert.cc", "c_api/uccl_ep.cc")
# Processor seconds of the units that take longest.
LONGEST = {
    "backend/gpu/dispatch.cu": 65.0,
    "backend/gpu/combine.cu": 45.0,
    "bindings/module.cc": 13.0,
    "bindings/gpu.cc": 10.0,
    "backend/gpu/queue_probe.cu": 6.0,
    "backend/gpu/clock.cu": 4.0,
}
OTHERS = 2.0  # of every other unit


def is_cold(source: str) -> bool:
    return source.removeprefix("csrc/").startswith(COLD)


def sees_gpus(source: str) -> bool:
    """Whether a build with kernels compiles it in another way than one without, or alone compiles it."""
    path = PurePath(source)
    return path.suffix == ".cu" or is_of_gpus(path) or source.removeprefix("csrc/") in CHOOSING


def is_of_gpus(path: PurePath) -> bool:
    return not {"gpu", "gpu.cc"}.isdisjoint(path.parts)


def seconds_of(source: str) -> float:
    return LONGEST.get(source.removeprefix("csrc/"), OTHERS)


def longest_first(sources: Iterable[str]) -> list[str]:
    """The order in which no core idles at the end."""
    return sorted(sources, key=lambda source: (-seconds_of(source), source))


class Progress:
    """Counts compiled units, and estimates from their times how long the others will take."""

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
