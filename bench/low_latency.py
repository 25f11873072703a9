"""Times of low-latency operations: whole, and sending and receiving apart.

    python bench/low_latency.py                                                  starts 2 ranks on this host
    torchrun --nproc_per_node=2 bench/low_latency.py --tokens 1 32 128 --sms 24 64

dispatch_*_us    one kernel, from raw BF16 rows to rows in slots; of FP8 with fp32 scales
combine_us       one kernel, from rows in slots to sums
*_send_us, *_receive_us   two kernels; what is received has been sent by all ranks long before
graph_us         GPUs only: an FP8 dispatch and a combine, a tenth of a graph of ten; graph_dispatch_us,
                 graph_combine_us: the same of one of them
gemm_us          GPUs only: matrix products of a millisecond; gemm_beside_us: between sending and receiving

With a limited link between domains, dispatch_wire_us and combine_wire_us are the bytes of the busiest rank,
divided by the link's rate.

Each is the median over runs of the slowest rank, from the moment when all GPUs have met. It contains the
launch of a kernel: `empty_us` is that of a kernel which does nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # started by its path, as torchrun does
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench import report
from bench.bounds import (
    EXPERTS,
    GBYTES_PER_S,
    HIDDEN,
    RANKS,
    RUNS,
    TOPK,
    add_output,
    num_ranks,
    refuse_config,
    refuse_split,
)
from bench.measure import finish_device, timed_on_gpu, timed_on_host, wake_links
from bench.ranks import Meeting, join_group, meeting, parse, start_ranks
from uccl_ep_train import Buffer, EpConfig, LowLatency
from uccl_ep_train.common.command_line import number, whole

MOST_TOKENS, MOST_SMS = 4096, 256
Timed = Callable[[Callable[[], None]], float]


def config_of(args: argparse.Namespace, tokens: int, sms: int) -> EpConfig:
    """Raises `ConfigError`."""
    return EpConfig(
        num_experts=args.experts,
        hidden=args.hidden,
        budget_bytes=2 << 30,
        low_latency_tokens=tokens,
        low_latency_topk=args.topk,
        low_latency_sms=sms or None,
        domain_size=num_ranks(args) // args.domains,
        loop_gbytes_per_s=args.link_gbytes_per_s,
        loop_latency_us=args.link_latency_us,
    )


class Cell:
    """One number of tokens and SMs: a buffer, inputs, and what is timed."""

    def __init__(self, args: argparse.Namespace, tokens: int, sms: int) -> None:
        self.buffer = Buffer(None, config_of(args, tokens, sms))
        self.calls, device = LowLatency(self.buffer), self.buffer.device
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        self.x = torch.randn(tokens, args.hidden, device=device, generator=generator).bfloat16()
        scores = torch.rand(tokens, args.experts, device=device, generator=generator)
        self.topk_idx = scores.topk(args.topk, 1)[1]
        self.weights = torch.rand(tokens, args.topk, device=device, generator=generator)
        # What a dispatch is given, and a combine.
        routing = self.topk_idx, self.weights
        early = args.weights == "dispatch"
        self.early: tuple[torch.Tensor, torch.Tensor | None] = routing if early else (self.topk_idx, None)
        self.late: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None) if early else routing
        got = self.calls.dispatch(self.x, *self.early, wire="bf16")
        assert isinstance(got.rows, torch.Tensor)
        self.rows, self.handle = torch.randn_like(got.rows), got.handle

    def dispatch(self, wire: str) -> None:
        self.calls.dispatch(self.x, *self.early, wire=wire)  # type: ignore[arg-type]

    def combine(self) -> None:
        self.calls.combine(self.rows, *self.late, self.handle)

    def apart(self, timed: Timed, which: str) -> tuple[float, float]:
        """Seconds of sending and of receiving."""
        sent: list[Any] = []

        def send() -> None:
            if which == "dispatch":
                sent.append(self.calls.send_dispatch(self.x, *self.early, wire="fp8_fp32"))
            else:
                sent.append(self.calls.send_combine(self.rows, *self.late, self.handle))

        def receive() -> None:
            sent.pop().receive()

        return timed(send), timed(receive)

    def capture(self, *calls: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for call in calls:
                call()
        return graph

    def products(self) -> Callable[[], None]:
        """Products that fill the GPU, each of some 350 us on an H100."""
        a, b = (torch.randn(4096, 8192, device=self.buffer.device).bfloat16() for _ in range(2))
        out = a.new_empty(4096, 4096)

        def multiply() -> None:
            for _ in range(3):
                torch.mm(a, b.T, out=out)

        return multiply

    def gemm_beside(self, timed: Timed, products: Callable[[], None]) -> float:
        sent = [self.calls.send_dispatch(self.x, *self.early, wire="fp8_fp32")]
        sums = self.calls.send_combine(self.rows, *self.late, self.handle)
        seconds = timed(products)
        sent[0].receive()
        sums.receive()
        return seconds

    def wire_bytes(self) -> dict[str, int]:
        """Of this rank to the other domains: a row of a token for each that has an expert of it."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        of_domain = ranks // self.buffer.topology.num_domains
        experts = self.buffer.config.num_experts // self.buffer.topology.num_domains
        reached = torch.zeros(len(self.x), self.buffer.topology.num_domains, dtype=torch.bool)
        reached.scatter_(1, self.topk_idx.cpu() // experts, True)
        reached[:, rank // of_domain] = False
        rows, hidden = int(reached.sum()), self.x.shape[1]
        return {"dispatch": rows * (hidden + hidden // 32), "combine": rows * 2 * hidden}


def measure(cell: Cell, timed: Timed, runs: int) -> dict[str, float]:
    """Microseconds, by name."""
    whole: dict[str, Callable[[], None]] = {
        "empty_us": lambda: torch.cuda._sleep(1) if torch.cuda.is_available() else None,
        "dispatch_fp8_us": lambda: cell.dispatch("fp8_fp32"),
        "dispatch_bf16_us": lambda: cell.dispatch("bf16"),
        "combine_us": cell.combine,
    }
    if cell.buffer.device.type == "cuda":
        dispatch = whole["dispatch_fp8_us"]
        whole["graph_us"] = cell.capture(*10 * (dispatch, cell.combine)).replay
        whole["graph_dispatch_us"] = cell.capture(*10 * (dispatch,)).replay
        whole["graph_combine_us"] = cell.capture(*10 * (cell.combine,)).replay
        products = whole["gemm_us"] = cell.products()
    seconds: dict[str, list[float]] = {name: [] for name in whole}
    for kind in ("dispatch", "combine"):
        seconds |= {f"{kind}_send_us": [], f"{kind}_receive_us": []}
    for _ in range(runs + 4):
        wake_links()
        for name, call in whole.items():
            seconds[name].append(timed(call))
        for kind in ("dispatch", "combine"):
            parts = cell.apart(timed, kind)
            for name, part in zip(("send", "receive"), parts, strict=True):
                seconds[f"{kind}_{name}_us"].append(part)
        if "gemm_us" in whole:
            seconds.setdefault("gemm_beside_us", []).append(cell.gemm_beside(timed, products))
    found = {}
    for name, values in seconds.items():
        slowest = torch.tensor(values[4:], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found[name] = report.quantile(1e6 * slowest, 0.5) / (10 if name.startswith("graph") else 1)
    return found


def run_rank(args: argparse.Namespace) -> int:
    """Runs one rank."""
    join_group(args.share_gpus)
    meet: Meeting | None = meeting() if torch.cuda.is_available() else None
    records = []

    def timed(call: Callable[[], None]) -> float:
        return timed_on_host(call) if meet is None else timed_on_gpu(meet, call)

    for tokens in args.tokens:
        for sms in args.sms:
            cell = Cell(args, tokens, sms)
            found = measure(cell, timed, args.runs)
            for kind, num_bytes in cell.wire_bytes().items() if args.link_gbytes_per_s else ():
                most = torch.tensor([num_bytes])
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
                found[f"{kind}_wire_us"] = int(most) / args.link_gbytes_per_s / 1e3
            finish_device()
            cell.buffer.check()
            cell.buffer.close()
            asked = {
                name: getattr(args, name)
                for name in ("hidden", "topk", "experts", "domains", "weights", "runs")
            }
            asked |= {"link_gbytes_per_s": args.link_gbytes_per_s, "link_latency_us": args.link_latency_us}
            shape = {"tokens": tokens, "num_sms": sms, "ranks": dist.get_world_size()}
            records.append({"system": "uccl_ep", "op": "low_latency"} | shape | asked | found)
            if dist.get_rank() == 0:
                print(f"T = {tokens}, {sms} SMs: {found}", flush=True)
    if meet is not None:
        meet.close()
    if dist.get_rank() == 0:
        report.write_results(records, args)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=whole(1, MOST_TOKENS), nargs="+", default=[128], help="per rank")
    parser.add_argument("--hidden", type=HIDDEN, default=7168)
    parser.add_argument("--topk", type=TOPK, default=8)
    parser.add_argument("--experts", type=EXPERTS, default=256)
    parser.add_argument(
        "--sms", type=whole(0, MOST_SMS), nargs="+", default=[0], help="of a kernel; 0: the default"
    )
    parser.add_argument("--domains", type=RANKS, default=1, help="the ranks are split into")
    parser.add_argument("--weights", choices=("dispatch", "combine"), default="combine", help="given to")
    parser.add_argument(
        "--link-gbytes-per-s", type=GBYTES_PER_S, default=0.0, help="between domains; 0: unlimited"
    )
    parser.add_argument("--link-latency-us", type=number(0, 1e6), default=0.0)
    parser.add_argument("--runs", type=RUNS, default=20)
    parser.add_argument("--ranks", type=RANKS, default=2, help="to start when not under torchrun")
    add_output(parser, "low_latency")
    args = parse(parser, argv)
    refuse_split(parser, args)
    if args.topk > args.experts:
        parser.error(f"--topk {args.topk}: allowed is 1 .. {args.experts}, the number of experts")
    for tokens, sms in itertools.product(args.tokens, args.sms):
        asked = f"--tokens {tokens} --sms {sms} --hidden {args.hidden}"
        refuse_config(parser, asked, partial(config_of, args, tokens, sms), num_ranks(args))
    if dist.is_torchelastic_launched():
        return run_rank(args)
    return start_ranks(args.ranks, Path(__file__), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
