"""The timed loop. In every run each system gets the same input; the order of the systems rotates."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import Case, Traffic, draw_routing
from bench.lineup import OURS_REFUSES, REFUSES, Lineup, agree, describe
from bench.ranks import Meeting, lacks_nccl, ranks_of_gpu
from bench.systems import Sample, System, UcclEp, largest_difference, on_one_host

START_MARGIN_S = 0.004  # longer than a rank needs to leave a collective when it has to wait for a core

GPU_RESERVE_BYTES = 16 << 30  # estimate: what all systems of the largest case of `ht` hold at once

# Outputs may differ by the order of BF16 sums, and by the rounding of rows to e4m3 (3 mantissa bits).
TOLERANCE = {"bf16": 2.0**-6, "fp8": 2.0**-3}


@dataclass(frozen=True)
class Measured:
    """The results of one system, by operation.

    wall_us   [run] of the slowest rank, from the common start
    cpu_us    [run] of all threads of all ranks together, from the call until `Timed` returns
    steps_us  time of each step, mean over runs, of the slowest rank; empty where it is not counted
    windows   mean over runs; 0 where they are not counted
    """

    system: System
    wall_us: dict[str, Tensor]
    cpu_us: dict[str, Tensor]
    steps_us: dict[str, dict[str, float]]
    wire_bytes: dict[str, int]
    link_bytes: dict[str, int]
    logical_bytes: int
    windows: dict[str, int]


Timed = Callable[[Callable[[], None]], float]
"""Collective: runs the call on all ranks at once, and returns the seconds that it took on this rank."""


class Recorder:
    """This rank's times of one system; `reduced` combines those of all ranks."""

    def __init__(self, system: System, timed: Timed) -> None:
        self.system = system
        self._timed = timed
        self._cpu_start = 0.0
        self._wall: dict[str, list[float]] = {op: [] for op in system.ops}
        self._cpu: dict[str, list[float]] = {op: [] for op in system.ops}
        self._steps: dict[str, dict[str, float]] = {op: {} for op in system.ops}
        self._wire: dict[str, list[tuple[int, int]]] = {op: [] for op in system.ops}
        self._windows: dict[str, float] = dict.fromkeys(system.ops, 0.0)
        self._logical: list[int] = []

    def run(self, sample: Sample, *, counted: bool) -> None:
        self.system.bind(sample)
        wake_links()
        finish_device()
        for op in self.system.ops:
            steps_before, windows_before = self.system.step_seconds(), self.system.num_windows()
            wall = self._timed(partial(self._start, op))
            cpu = time.process_time() - self._cpu_start
            if counted:
                self._wall[op].append(1e6 * wall)
                self._cpu[op].append(1e6 * cpu)
                self._count_steps(op, steps_before)
                self._windows[op] += self.system.num_windows() - windows_before
                self._wire[op].append(self.system.wire_bytes(op, sample.traffic))
        self.system.check()
        if counted:
            self._logical.append(sample.traffic.logical_bytes())

    def _start(self, op: str) -> None:
        """What ranks do to start together is no part of the system's processor time."""
        self._cpu_start = time.process_time()
        self.system.run(op)

    def reduced(self) -> Measured:
        """Collective."""
        ops, num_runs = self.system.ops, len(self._logical)
        wall = torch.tensor([self._wall[op] for op in ops])
        cpu = torch.tensor([self._cpu[op] for op in ops])
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        dist.all_reduce(cpu, op=dist.ReduceOp.SUM)
        steps: list[dict[str, dict[str, float]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(steps, self._steps)
        slowest = {
            op: {name: max(s[op].get(name, 0.0) for s in steps) / num_runs * 1e6 for name in self._steps[op]}
            for op in ops
        }
        mean = {op: torch.tensor(self._wire[op], dtype=torch.float64).mean(0).tolist() for op in ops}
        return Measured(
            system=self.system,
            wall_us=dict(zip(ops, wall, strict=True)),
            cpu_us=dict(zip(ops, cpu, strict=True)),
            steps_us=slowest,
            wire_bytes={op: round(mean[op][0]) for op in ops},
            link_bytes={op: round(mean[op][1]) for op in ops},
            logical_bytes=round(sum(self._logical) / num_runs),
            windows={op: round(self._windows[op] / num_runs) for op in ops},
        )

    def _count_steps(self, op: str, before: dict[str, float]) -> None:
        after = self.system.step_seconds()
        for name in after:
            self._steps[op][name] = self._steps[op].get(name, 0.0) + after[name] - before[name]


def start_together() -> float:
    """Collective. Waits for one moment of the host's clock, the same on all ranks, and returns it.

    All ranks count from this moment. The time thus includes a rank's wait for a core, and no rank is measured
    alone while others wait for a core.
    """
    moment = torch.tensor([time.perf_counter() + START_MARGIN_S], dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    start = float(moment)
    time.sleep(max(0.0, start - time.perf_counter()))
    return start


def timed_on_host(call: Callable[[], None]) -> float:
    start = start_together()
    call()
    return time.perf_counter() - start


def timed_between_hosts(call: Callable[[], None]) -> float:
    """There is no common clock: each rank counts from the moment when it leaves a barrier."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed_on_gpu(meet: Meeting, call: Callable[[], None]) -> float:
    """Seconds on the caller's stream, from the meeting of all GPUs until the stream may use the results.

    The host queues the call before the GPUs have met, as it runs ahead in training. If the host then waits
    (for counts), this is part of the time.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(), end.record()  # torch makes an event when it is first recorded, which takes 20 to 40 us
    stream = torch.cuda.current_stream()  # asking for it takes as long, and a caller has it already
    torch.cuda._sleep(8_000_000)  # cycles, about 4 ms: longer than it takes to queue any system's call
    meet()
    begin.record(stream)
    call()
    end.record(stream)
    torch.cuda.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def wake_links() -> None:
    """Collective. Sends something over NVLink, which sleeps after about 100 ms without traffic.

    Here such a pause is the drawing of a routing. The first transfer after it takes 0.3 ms more. In training
    NVLink always has traffic.
    """
    if torch.cuda.is_available() and not lacks_nccl():
        dist.all_reduce(torch.zeros(1 << 22, device="cuda"))


def finish_device() -> None:
    """Waits until all that was queued on this rank's GPU, if it has one, is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reserve_gpu_memory() -> None:
    """Makes torch's caching allocator take one large block, which it keeps.

    Otherwise an output of a new size would need a cudaMalloc in a timed call, which would stall running
    kernels. All ranks of a GPU together take at most a quarter of it: buffers take theirs from the driver.
    """
    if torch.cuda.is_available():
        _, gpu_bytes = torch.cuda.mem_get_info()
        most_bytes = gpu_bytes // (4 * ranks_of_gpu())
        torch.empty(min(GPU_RESERVE_BYTES, most_bytes), dtype=torch.uint8, device="cuda")


def draw_sample(case: Case, x_TH: Tensor, seed: int) -> Sample:
    topk_idx_NTK, weights_NTK = draw_routing(case, seed)
    rank, device = dist.get_rank(), x_TH.device
    idx_TK, weights_TK = topk_idx_NTK[rank].to(device), weights_NTK[rank].to(device)
    return Sample(x_TH, idx_TK.contiguous(), weights_TK.contiguous(), Traffic(case, topk_idx_NTK))


def measure(
    case: Case,
    lineup: Lineup,
    *,
    runs: int,
    warmup: int,
    seed: int,
    meet: Meeting,
    progress: Callable[[int, int], None],
) -> list[Measured]:
    """Collective. Systems that cannot run the case leave the line-up.

    Raises RuntimeError if results of `uccl_ep` differ from a peer's by more than the tolerance.
    """
    generator = torch.Generator().manual_seed(seed * case.ranks + dist.get_rank())
    x_TH = torch.randn(case.tokens, case.hidden, generator=generator).to(torch.bfloat16)
    if torch.cuda.is_available():
        x_TH = x_TH.cuda()
    timed = timed_on_host if on_one_host() else timed_between_hosts
    if x_TH.is_cuda:
        timed = partial(timed_on_gpu, meet)
    sample = draw_sample(case, x_TH, seed=seed * 100_003)
    for system in list(lineup.systems):
        reason = try_out(system, sample)
        if reason:
            lineup.drop(system, reason)
    compare_results(lineup)
    recorders = [Recorder(system, timed) for system in lineup.systems]
    gc.collect()
    gc.disable()
    try:
        for run in range(warmup + runs):
            sample = draw_sample(case, x_TH, seed=seed * 100_003 + 1 + run)
            for turn in range(len(recorders)):
                recorders[(run + turn) % len(recorders)].run(sample, counted=run >= warmup)
            progress(run + 1, warmup + runs)
    finally:
        gc.enable()
    return [recorder.reduced() for recorder in recorders]


def try_out(system: System, sample: Sample) -> str:
    """Collective: runs every operation once. Returns why the system cannot run one, or ""."""
    reason = ""
    refusals = OURS_REFUSES if isinstance(system, UcclEp) else REFUSES
    try:
        system.bind(sample)
        for op in system.ops:
            system.run(op)
        finish_device()
        system.check()
    except refusals as error:
        reason = describe(error)
    return agree(reason)


def compare_results(lineup: Lineup) -> None:
    """Collective. Checks that all systems have computed the same.

    Rows must agree bit for bit (except through FP8), outputs and gradients up to the order of sums. A peer
    that differs leaves the line-up. Raises RuntimeError if `uccl_ep` differs.
    """
    comparable = [(system, found) for system in lineup.systems if (found := system.results())]
    baseline = next((entry for entry in comparable if not isinstance(entry[0], UcclEp)), None)
    if baseline is None:
        return
    for system, found in comparable:
        reason = agree(difference_of(system, found, *baseline))
        if reason and isinstance(system, UcclEp):
            raise RuntimeError(f"{lineup.case}: {system.label}: {reason}")
        if reason:
            lineup.drop(system, reason)


def difference_of(
    system: System, found: dict[str, Tensor], other: System, expected: dict[str, Tensor]
) -> str:
    """In what the two systems differ by more than they may, or ""."""
    for what in found.keys() & expected.keys():
        exact = what == "rows" and system.dtype == "bf16"
        limit = 0.0 if exact else TOLERANCE[system.dtype]
        difference = largest_difference(found[what], expected[what])
        if not difference <= limit:
            return f"{what} differ from those of {other.label} by {difference:g}, allowed is {limit:g}"
    return ""
