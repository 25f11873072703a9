"""Rows of GPT-OSS's 2880 elements as they are, against rows that the caller pads to a multiple of 128.

    torchrun --nproc_per_node=4 bench/row_width.py
    torchrun --nproc_per_node=4 bench/row_width.py --share-gpus      # ranks share a GPU by NVIDIA's MPS

Times a cached dispatch and a combine. Padded rows also leave and reach the experts at their own width.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from bench import report
from bench.bounds import RUNS, TOKENS, add_output, num_ranks
from bench.ranks import join_group, parse
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.common.handle import DispatchHandle
from uccl_ep_train.settings import env

HIDDEN, PADDED, EXPERTS, TOPK, SMS = 2880, 2944, 128, 4, 24
Pair = Callable[[], tuple[Tensor, Tensor]]
Wire = Literal["bf16", "fp8"]
WIRES: tuple[Wire, ...] = ("bf16", "fp8")


def pairs_of(buffer: Buffer, x_TH: Tensor, handle: DispatchHandle, wire: Wire) -> dict[str, Pair]:
    """Each gives the experts' rows and the sums, [R, H] and [T, H]."""

    def as_they_are() -> tuple[Tensor, Tensor]:
        rows = buffer.dispatch(x_TH, handle=handle, dispatch_dtype=wire).rows
        return rows, buffer.combine(rows, handle)

    def padded() -> tuple[Tensor, Tensor]:
        zeros = (0, PADDED - HIDDEN)
        rows = buffer.dispatch(pad(x_TH, zeros), handle=handle, dispatch_dtype=wire).rows
        rows = rows[:, :HIDDEN].contiguous()
        return rows, buffer.combine(pad(rows, zeros), handle)[:, :HIDDEN].contiguous()

    return {"as they are": as_they_are, "padded": padded}


def time_us(pair: Pair) -> float:
    """Of the slowest rank; all begin together."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
    began = time.perf_counter()
    if on_gpu:
        events[0].record()
    pair()
    if on_gpu:
        events[1].record()
        torch.cuda.synchronize()
        took = events[0].elapsed_time(events[1]) * 1e3
    else:
        took = (time.perf_counter() - began) * 1e6
    slowest = torch.tensor(took)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(buffer: Buffer, tokens: int, wire: Wire, runs: int) -> list[report.Record]:
    """A record for each way, whose runs take turns. Raises RuntimeError if their bits differ."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TH = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16).to(buffer.device)
    idx_TK = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    handle = buffer.dispatch(x_TH, idx_TK.to(buffer.device), dispatch_dtype=wire).handle
    pairs = pairs_of(buffer, x_TH, handle, wire)
    found = [[part.view(torch.int16) for part in pair()] for pair in pairs.values()]
    if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
        raise RuntimeError(f"{tokens} tokens, {wire}: padded rows have other bits")
    times: dict[str, list[float]] = {name: [] for name in pairs}
    for run in range(runs + 3):
        for name, pair in pairs.items():
            took = time_us(pair)
            if run >= 3:
                times[name].append(took)
    quantiles = (("p10", 0.1), ("median", 0.5), ("p90", 0.9))
    return [
        {
            "system": "uccl_ep", "op": "cached dispatch + combine", "rows": name, "dtype": wire,
            "tokens": tokens, "hidden": HIDDEN, "padded_to": PADDED, "topk": TOPK, "experts": EXPERTS,
            "ranks": dist.get_world_size(), "num_sms": SMS, "runs": runs,
            **{f"{q}_us": report.quantile(torch.tensor(its, dtype=torch.float64), at) for q, at in quantiles},
        }
        for name, its in times.items()
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=TOKENS, nargs="+", default=[128, 1024, 4096], help="per rank")
    parser.add_argument("--runs", type=RUNS, default=20, help="counted runs of each case (20)")
    add_output(parser, "row_width")
    args = parse(parser, argv)
    if not dist.is_torchelastic_launched() or EXPERTS % num_ranks(args):
        ranks = env.read("WORLD_SIZE")
        parser.error(
            f"WORLD_SIZE = {ranks!r}: allowed are ranks of torchrun, of which {EXPERTS} is a multiple"
        )
    join_group(args.share_gpus)
    config = EpConfig(num_experts=EXPERTS, hidden=PADDED, num_sms=SMS, budget_bytes=1 << 30)
    records = []
    with Buffer(dist.group.WORLD, config) as buffer:
        for tokens in args.tokens:
            for wire in WIRES:
                records += [
                    its | report.about_here(args.commit) for its in measure(buffer, tokens, wire, args.runs)
                ]
                if dist.get_rank() == 0:
                    times = ", ".join(f"{its['rows']} {its['median_us']} us" for its in records[-2:])
                    print(f"{tokens:>6} tokens, {wire}: {times}", flush=True)
    if dist.get_rank() == 0:
        report.write_json(records, Path(f"{args.out}.json"))
        print(f"written: {args.out}.json")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
