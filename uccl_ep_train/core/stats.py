"""The memory plan, and a buffer's statistics, summed over ranks and printed.

Names of statistics, counted since the buffer was made; seconds unless the name says otherwise:

    caller.{dispatch, combine, dispatch_backward, combine_backward}.{calls, seconds}
                        what callers asked for, and the time they spent in it, launch and wait; what ran
                        behind their backs is not in it
    dispatch.*, combine.*    operations of the engine (a backward of dispatch is a combine), its busy time
    rows.*, pairs.*     by the step that moved them
    ring.*              chunks, laps and waits of each window
    ship.*              chunks and bytes on the wire by kind and destination domain
    busy_seconds.*, blocked_seconds.*    at work and waiting, by step
    straggler.*         the rank that was waited for longest (-1: none), and how long
    credit.*, proxy.*   waits for credits, refused posts, arrivals, dropped duplicates;
                        proxy.command_usec.{p50, p99}: from the queue until flushed, the last 1024 chunks
    memory.*            sizes in bytes

On a GPU:

    step_seconds.*      what the first block spent in a step, waiting included
    dispatch.guesses*   new plans whose memory was taken before the counts were known, and those of them that
                        needed more
    straggler.*         waiting for it to enter operations
    rows.*              without operations with a capacity
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from uccl_ep_train.core.cuda import built, choose_device
from uccl_ep_train.core.native import load_native, native_config
from uccl_ep_train.core.topology import Topology, checked_number
from uccl_ep_train.errors import DtypeError
from uccl_ep_train.settings.config import EpConfig

CALL_KINDS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
"""What calls are counted under. dispatch_backward is a combine of gradients, combine_backward a dispatch."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a rank allocates for a buffer, in bytes.

    entries             (name, bytes) of each part
    budget_bytes        the configured limit
    least_budget_bytes  the smallest budget that this configuration works with
    batch_streams       on a GPU: how many streams of other ranks a combine merges at once
    stream_batches      more than 1: memory is too small for all streams at once
    max_tokens          on a GPU: tokens of a rank that an operation may have; None: any number
    max_pairs           on a GPU: experts of those tokens, together
    window_tokens       on a GPU: tokens of a rank that a dispatch of the widest rows sends at once, even if
                        all go to one domain
    """

    entries: tuple[tuple[str, int], ...]
    budget_bytes: int
    least_budget_bytes: int
    batch_streams: int = 0
    stream_batches: int = 1
    max_tokens: int | None = None
    max_pairs: int | None = None
    window_tokens: int | None = None

    @property
    def total_bytes(self) -> int:
        """Equals the bytes that the engine allocates."""
        return sum(size for _, size in self.entries)

    def __getitem__(self, name: str) -> int:
        return dict(self.entries)[name]

    def __str__(self) -> str:
        rows = [*self.entries, ("total", self.total_bytes), ("budget", self.budget_bytes)]
        rows.append(("least budget", self.least_budget_bytes))
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            f"{name.ljust(width)}  {size:>15,d} bytes  {size / 2**20:10.3f} MiB" for name, size in rows
        )


def memory_plan(config: EpConfig, num_ranks_or_topology: int | Topology, rank: int = 0) -> MemoryPlan:
    """What `rank` would allocate, without allocating it.

    With a number of ranks, the domains are those the configuration sets, else one domain. Where
    `config.backend` comes to "cuda", memory of the GPU, and what goes with it on the host; said outright,
    "cuda" needs no GPU for that.

    Raises `MemoryBudgetError` naming the least budget (bytes) where `config.budget_bytes` is below it,
    `ConfigError` where the configuration does not fit the number of ranks, or `rank` is none of them,
    `DtypeError` for another config.
    """
    if not isinstance(config, EpConfig):
        raise DtypeError(f"config is {type(config).__name__}; allowed is an EpConfig")
    if isinstance(num_ranks_or_topology, Topology):
        topology = num_ranks_or_topology
    else:
        one_domain = Topology.split(num_ranks_or_topology, num_ranks_or_topology)
        topology = Topology.from_config(config, num_ranks_or_topology) or one_domain
    native = native_config(config, topology, checked_number("rank", rank, 0, topology.num_ranks - 1))
    core = load_native()
    on_gpu = (config.gpu.backend == "cuda" and built()) or choose_device(config).type == "cuda"
    entries = core.gpu_memory_plan(native) if on_gpu else core.memory_plan(native)
    least = core.gpu_least_budget(native) if on_gpu else core.least_budget(native)
    limits = core.gpu_limits(native) if on_gpu else (0, 1, None, None, None)
    return MemoryPlan(
        entries=tuple((name, int(size)) for name, size in entries),
        budget_bytes=config.memory.budget_bytes,
        least_budget_bytes=int(least),
        batch_streams=limits[0],
        stream_batches=limits[1],
        max_tokens=limits[2],
        max_pairs=limits[3],
        window_tokens=limits[4],
    )


class CallClock:
    """Counts a buffer's calls and the seconds that callers spent in them, launch and wait, by kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = dict.fromkeys(CALL_KINDS, 0)
        self._seconds = dict.fromkeys(CALL_KINDS, 0.0)

    def add(self, kind: str, seconds: float, *, starts: bool) -> None:
        with self._lock:
            self._calls[kind] += starts
            self._seconds[kind] += seconds

    def read(self) -> dict[str, float]:
        """caller.<kind>.calls and caller.<kind>.seconds."""
        with self._lock:
            return {
                f"caller.{kind}.{what}": float(counters[kind])
                for kind in CALL_KINDS
                for what, counters in (("calls", self._calls), ("seconds", self._seconds))
            }


def sum_stats(stats: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Statistics of several ranks or buffers as one: sums, but the largest of sizes, peaks and percentiles,
    and the straggler that a rank waited for longest.
    """
    total: dict[str, float] = {}
    for entry in stats:
        longest = entry.get("straggler.wait_seconds", 0.0) >= total.get("straggler.wait_seconds", 0.0)
        for name, value in entry.items():
            before = total.get(name, 0.0)
            if name.startswith("straggler."):
                total[name] = value if longest else before
            elif name.startswith("memory.") or "peak" in name or name.endswith((".p50", ".p99")):
                total[name] = max(before, value)
            else:
                total[name] = before + value
    return total


def format_stats(stats: Mapping[str, float]) -> str:
    """One line per number."""
    width = max(map(len, stats), default=0)
    return "\n".join(f"{name.ljust(width)}  {_text(name, value)}" for name, value in stats.items())


def _text(name: str, value: float) -> str:
    if not float(value).is_integer():
        return f"{value:.6g}"
    if name.endswith("bytes"):
        return f"{int(value):,d} ({value / 2**20:.3f} MiB)"
    return f"{int(value):,d}"
