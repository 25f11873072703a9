"""The timed loop. In every run each system gets the same input, in an order that turns from run to run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import Case, Traffic, draw_routing
from bench.systems import OPS, Sample, System, largest_difference
from uccl_ep_train import env

START_MARGIN_S = 0.004  # longer than a rank needs to leave a collective when it has to wait for a core

# Outputs of BF16 sums in another order, and of rows that went through e4m3 (3 mantissa bits).
TOLERANCE = {"bf16": 2.0**-6, "fp8": 2.0**-3}


@dataclass(frozen=True)
class Measured:
    """One system. The last axis of each array is the run.

    wall_us   [op, run] of the slowest rank, from the common start
    cpu_us    [op, run] of all threads of all ranks together
    steps_us  [op] time of each step, mean over runs, of the slowest rank; empty where it is not counted
    """

    system: System
    wall_us: Tensor
    cpu_us: Tensor
    steps_us: dict[str, dict[str, float]]
    wire_bytes: dict[str, int]
    link_bytes: dict[str, int]
    logical_bytes: int


Timed = Callable[[Callable[[], None]], float]
"""Collective: runs the call on all ranks at once; the seconds that it took on this rank."""


class Recorder:
    """This rank's times of one system; `reduced` brings the ranks together."""

    def __init__(self, system: System, timed: Timed) -> None:
        self.system = system
        self._timed = timed
        self._wall: list[list[float]] = []
        self._cpu: list[list[float]] = []
        self._steps: dict[str, dict[str, float]] = {op: {} for op in OPS}
        self._wire: dict[str, list[tuple[int, int]]] = {op: [] for op in OPS}
        self._logical: list[int] = []

    def run(self, sample: Sample, *, counted: bool) -> None:
        self.system.bind(sample)
        finish_device()
        wall, cpu = [], []
        for op in OPS:
            steps_before = self.system.step_seconds()
            cpu_start = time.process_time()
            wall.append(1e6 * self._timed(partial(self.system.run, op)))
            cpu.append(1e6 * (time.process_time() - cpu_start))
            if counted:
                self._count_steps(op, steps_before)
                self._wire[op].append(self.system.wire_bytes(op, sample.traffic))
        if counted:
            self._wall.append(wall)
            self._cpu.append(cpu)
            self._logical.append(sample.traffic.logical_bytes())

    def reduced(self) -> Measured:
        """Collective."""
        wall, cpu = torch.tensor(self._wall).T.contiguous(), torch.tensor(self._cpu).T.contiguous()
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        dist.all_reduce(cpu, op=dist.ReduceOp.SUM)
        steps: list[dict[str, dict[str, float]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(steps, self._steps)
        num_runs = len(self._wall)
        slowest = {
            op: {name: max(s[op].get(name, 0.0) for s in steps) / num_runs * 1e6 for name in self._steps[op]}
            for op in OPS
        }
        mean = {op: torch.tensor(self._wire[op], dtype=torch.float64).mean(0).tolist() for op in OPS}
        return Measured(
            system=self.system,
            wall_us=wall,
            cpu_us=cpu,
            steps_us=slowest,
            wire_bytes={op: round(mean[op][0]) for op in OPS},
            link_bytes={op: round(mean[op][1]) for op in OPS},
            logical_bytes=round(sum(self._logical) / num_runs),
        )

    def _count_steps(self, op: str, before: dict[str, float]) -> None:
        after = self.system.step_seconds()
        for name in after:
            self._steps[op][name] = self._steps[op].get(name, 0.0) + after[name] - before[name]


def start_together() -> float:
    """All ranks leave at one moment of the host's clock, and count from it: a rank that gets no core at first
    is part of the time, and no rank is measured alone while others wait for a core. Returns that moment.
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
    """There is no common clock: each rank counts from where it left a barrier."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed_on_gpu(call: Callable[[], None]) -> float:
    """From the end of a collective on the caller's stream, at which all GPUs arrive together, to the moment
    when the stream may use the results. The host queues the call while the collective is still under way, as
    in training, where it runs ahead; what it then waits for (counts) is in the time.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # cycles, about 1 ms: longer than any of the systems takes to be queued
    dist.all_reduce(torch.zeros(1, device="cuda"))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def finish_device() -> None:
    """What was queued on this rank's GPU, if it has one, is over."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def draw_sample(case: Case, x_TH: Tensor, seed: int) -> Sample:
    topk_idx_NTK, weights_NTK = draw_routing(case, seed)
    rank, device = dist.get_rank(), x_TH.device
    idx_TK, weights_TK = topk_idx_NTK[rank].to(device), weights_NTK[rank].to(device)
    return Sample(x_TH, idx_TK.contiguous(), weights_TK.contiguous(), Traffic(case, topk_idx_NTK))


def measure(
    case: Case,
    systems: Sequence[System],
    *,
    runs: int,
    warmup: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> list[Measured]:
    """Collective. Raises RuntimeError if the systems' results do not belong to the same computation."""
    generator = torch.Generator().manual_seed(seed * case.ranks + dist.get_rank())
    x_TH = torch.randn(case.tokens, case.hidden, generator=generator).to(torch.bfloat16)
    if torch.cuda.is_available():
        x_TH = x_TH.cuda()
    one_host = env.read("LOCAL_WORLD_SIZE") == env.read("WORLD_SIZE")
    timed = timed_on_host if one_host else timed_between_hosts
    if x_TH.is_cuda:
        timed = timed_on_gpu
    recorders = [Recorder(system, timed) for system in systems]
    gc.collect()
    gc.disable()
    try:
        for run in range(warmup + runs):
            sample = draw_sample(case, x_TH, seed=seed * 100_003 + run)
            for turn in range(len(recorders)):
                recorders[(run + turn) % len(recorders)].run(sample, counted=run >= warmup)
            if run == 0:
                compare_results(case, systems)
            progress(run + 1, warmup + runs)
    finally:
        gc.enable()
    return [recorder.reduced() for recorder in recorders]


def compare_results(case: Case, systems: Sequence[System]) -> None:
    """All systems did the same: rows bit for bit (except through FP8), outputs up to the order of sums."""
    comparable = [(system, both) for system in systems if (both := system.results()) is not None]
    baseline = next((entry for entry in comparable if entry[0].name != "uccl_ep"), None)
    if baseline is None:
        return
    for system, (rows, out) in comparable:
        allowed = TOLERANCE[system.dtype]
        allowed_rows = 0.0 if system.dtype == "bf16" else allowed
        for what, mine, theirs, limit in (
            ("rows", rows, baseline[1][0], allowed_rows),
            ("output", out, baseline[1][1], allowed),
        ):
            difference = largest_difference(mine, theirs)
            if difference > limit:
                raise RuntimeError(
                    f"{case}: {what} of {system.label} differ from those of {baseline[0].label} by "
                    f"{difference:g}, allowed is {limit:g}: they are not comparable"
                )
