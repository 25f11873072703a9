"""Measuring, as DeepEP's tests call it. On a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CACHE_BYTES = 256_000_000


def flush_l2_cache(enabled: bool = True) -> None:
    if enabled:
        torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda").zero_()


def bench(
    fn: Callable[[], object],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], object] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Seconds of a call between two events: (average, least, most), without the first measured call."""
    for _ in range(num_warmups):
        fn()
    spans = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        spans.append((begin, end))
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) / 1e3 for begin, end in spans[1:]]
    return sum(times) / len(times), min(times), max(times)


@contextlib.contextmanager
def _quiet(enabled: bool) -> Iterator[None]:
    """What native code prints goes nowhere, too."""
    if not enabled:
        yield
        return
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)


def _kernels(profiler: Any, trace_path: str | None) -> list[tuple[str, float]]:
    """(name, seconds) of each kernel, in the order of their begin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace_path or Path(folder) / "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return [(event["name"], event["dur"] / 1e6) for event in kernels]


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], object] | None = None,
) -> Any:
    """Average seconds of the kernels whose name contains each of `kernel_names`; 0 where there is none.

    With num_kernels_per_period > 1 a list for each name: of every kernel in a call.
    """
    fn()
    with _quiet(suppress_kineto_output):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(num_tests):
                flush_l2_cache(flush_l2)
                if barrier_comm_profiling:
                    if barrier is not None:
                        barrier()
                    else:
                        dist.all_reduce(torch.ones(1, dtype=torch.float32, device="cuda"))
                fn()
            torch.cuda.synchronize()
        kernels = _kernels(profiler, trace_path)
    results: list[Any] = []
    for name in (kernel_names,) if isinstance(kernel_names, str) else kernel_names:
        times = [seconds for kernel, seconds in kernels if name in kernel]
        phases = [times[i::num_kernels_per_period] for i in range(num_kernels_per_period)]
        averages = [sum(phase) / len(phase) if phase else 0.0 for phase in phases]
        results.append(averages if num_kernels_per_period > 1 else averages[0])
    return results[0] if isinstance(kernel_names, str) else tuple(results)
