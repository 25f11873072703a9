"""Processor time of proxies on a busy and on an idle link, and the delay of an operation after a pause.

    python bench/proxy_load.py                                       starts 4 ranks on this host, in 2 domains
    torchrun --nproc_per_node=4 bench/proxy_load.py --tokens 4096

busy    processor time of the proxy threads in each second of operations, which run one after the other
copier  the same for the threads that pass `loop`'s copies to the GPUs; a NIC needs no such threads
idle    processor time of both kinds of threads while the program sleeps
replay  GPUs only: time of a captured dispatch and combine, replayed at once, after a sleep, and after a sleep
        and a wake() of the buffer

With --domains 1 there are no proxies: a delay after the sleep then has other causes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # started by its path, as torchrun does
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import time

import torch
import torch.distributed as dist

from bench import report
from bench.bounds import (
    GBYTES_PER_S,
    HIDDEN,
    RANKS,
    TOKENS,
    add_output,
    num_ranks,
    refuse_config,
    refuse_split,
)
from bench.measure import finish_device, wake_links
from bench.ranks import (
    Meeting,
    join_group,
    meeting,
    parse,
    start_ranks,
    too_many_sms,
)
from uccl_ep_train import Buffer, EpConfig, errors

THREAD, COPIER = "uccl_ep_proxy", "uccl_ep_copier"
EXPERTS_PER_RANK, TOPK = 8, 4
BUSY_S, IDLE_S = 2.0, 1.0
REPLAYS = 10


def thread_seconds(thread: str = THREAD) -> float:
    """Processor time of this process's threads with this name."""
    seconds = 0.0
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == thread:
                # Linux's clock of a thread's processor time: MAKE_THREAD_CPUCLOCK(id, CPUCLOCK_SCHED).
                seconds += time.clock_gettime(~int(task.name) << 3 | 6)
        except OSError:  # the thread has ended
            continue
    return seconds


def config_of(args: argparse.Namespace) -> EpConfig:
    """Raises `ConfigError`."""
    ranks = num_ranks(args)
    return EpConfig.from_env(
        num_experts=EXPERTS_PER_RANK * ranks, hidden=args.hidden, dispatch_dtype="bf16",
        domain_size=ranks // args.domains, loop_gbytes_per_s=args.link_gbytes_per_s, transport="loop",
    )  # fmt: skip


class Load:
    """A buffer with one routing, whose plan is known after the first operation."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = config_of(args)
        if reason := too_many_sms(config):
            raise errors.ConfigError(reason)
        self.buffer = Buffer(None, config)
        device = self.buffer.device
        self.x_TH = torch.randn(args.tokens, args.hidden, dtype=torch.bfloat16, device=device)
        routing_TE = torch.rand(args.tokens, config.num_experts, device=device)
        self.idx_TK = routing_TE.topk(TOPK, dim=1).indices
        self.handle = self.buffer.dispatch(self.x_TH, self.idx_TK).handle

    def operation(self) -> None:
        got = self.buffer.dispatch(self.x_TH, handle=self.handle)
        self.buffer.combine(got.rows, got.handle)
        finish_device()

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            got = self.buffer.dispatch(self.x_TH, handle=self.handle)
            self.buffer.combine(got.rows, got.handle)
        return graph


def slowest(value: float) -> float:
    """Collective."""
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def measure_busy(load: Load) -> list[float]:
    """Cores that the busiest proxy uses, and cores that the busiest copier uses."""
    for _ in range(3):
        load.operation()
    dist.barrier()
    started, before = time.monotonic(), [thread_seconds(name) for name in (THREAD, COPIER)]
    while slowest(time.monotonic() - started) < BUSY_S:
        load.operation()
    took = time.monotonic() - started
    return [
        slowest((thread_seconds(name) - was) / took)
        for name, was in zip((THREAD, COPIER), before, strict=True)
    ]


def measure_idle() -> float:
    """Cores that proxy and copier together use on the busiest rank."""
    time.sleep(0.2)
    before = thread_seconds(THREAD) + thread_seconds(COPIER)
    time.sleep(IDLE_S)
    return slowest((thread_seconds(THREAD) + thread_seconds(COPIER) - before) / IDLE_S)


def measure_replays(
    load: Load, graph: torch.cuda.CUDAGraph, meet: Meeting, *, pause_s: float, wakes: bool = False
) -> torch.Tensor:
    """Microseconds of each replay on the slowest rank, from the moment when all ranks are ready."""
    took = []
    for _ in range(REPLAYS):
        time.sleep(pause_s)
        wake_links()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if wakes:
            load.buffer.wake()
        meet()
        begin.record()
        graph.replay()
        end.record()
        finish_device()
        load.buffer.check()
        took.append(slowest(1e3 * float(begin.elapsed_time(end))))
    return torch.tensor(took, dtype=torch.float64)


def run_rank(args: argparse.Namespace) -> int:
    """Runs one rank."""
    join_group(args.share_gpus)
    load = Load(args)
    busy, copier = measure_busy(load)
    found = {
        "busy_cores": round(busy, 3),
        "copier_cores": round(copier, 3),
        "idle_cores": round(measure_idle(), 3),
    }
    if load.buffer.device.type == "cuda":
        graph, meet = load.capture(), meeting()
        measure_replays(load, graph, meet, pause_s=0.0)
        for name, pause_s, wakes in (
            ("replay_us", 0.0, False),
            ("replay_after_idling_us", IDLE_S, False),
            ("replay_after_idling_and_wake_us", IDLE_S, True),
        ):
            found[name] = report.quantile(
                measure_replays(load, graph, meet, pause_s=pause_s, wakes=wakes), 0.5
            )
        meet.close()
        del graph
    load.buffer.close()
    if dist.get_rank() == 0:
        asked = {name: getattr(args, name) for name in ("tokens", "hidden", "domains", "link_gbytes_per_s")}
        record = {"system": "uccl_ep", "op": "proxy_load", "ranks": dist.get_world_size()} | asked | found
        for name, value in found.items():
            print(f"{name:>31}  {value}")
        report.write_results([record], args)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=TOKENS, default=1024, help="per rank")
    parser.add_argument("--hidden", type=HIDDEN, default=1024)
    parser.add_argument("--domains", type=RANKS, default=2, help="the ranks are split into; 1: no proxies")
    parser.add_argument("--link-gbytes-per-s", type=GBYTES_PER_S, default=50.0, help="0: unlimited")
    parser.add_argument("--ranks", type=RANKS, default=4, help="to start when not under torchrun")
    add_output(parser, "proxy_load")
    args = parse(parser, argv)
    refuse_split(parser, args)
    refuse_config(parser, f"--hidden {args.hidden}", lambda: config_of(args), num_ranks(args))
    if dist.is_torchelastic_launched():
        return run_rank(args)
    return start_ranks(args.ranks, Path(__file__), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
