"""Growth of processor time with the number of ranks: creation, a new dispatch, a combine, close.

    python bench/growth.py                               16 to 128 ranks on the host backend, in domains of 8

All ranks are threads of one process, and the time is that of the whole process. Each run is a process of its
own. The runs of all sizes alternate. An exponent is the slope of log time by log ranks: 1 means that the work
of a rank does not depend on the number of ranks.

routing  `near`: half of a token's experts are in its rank's domain and half in one other domain, so that a
         rank's rows do not depend on the number of domains. `uniform`: any experts.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench import report
from bench.bounds import RANKS, RUNS, add_output
from tests.harness import RankGroup
from uccl_ep_train import Buffer

OPS = ("creation", "dispatch", "combine", "close")
HIDDEN, TOKENS, TOPK, EXPERTS_PER_RANK = 256, 64, 4, 2
TIMEOUT_S = 300.0
# Rings are cut to fit it. With this one the regions of all numbers of ranks differ by a fifth at most.
BUDGET_BYTES = 14 << 20


def near(rank: int, ranks: int, domain_size: int, generator: torch.Generator) -> torch.Tensor:
    """[TOKENS, TOPK]: experts of two domains, half of them of the rank's own; see the text above."""
    of_domain, domains = domain_size * EXPERTS_PER_RANK, ranks // domain_size
    own = rank // domain_size
    other_T = torch.randint(max(domains - 1, 1), (TOKENS,), generator=generator)
    other_T = torch.where(other_T >= own, other_T + 1, other_T) % domains
    halves = [torch.rand(TOKENS, of_domain, generator=generator).argsort(1)[:, : TOPK // 2] for _ in range(2)]
    return torch.cat([halves[0] + own * of_domain, halves[1] + other_T[:, None] * of_domain], 1)


def uniform(rank: int, ranks: int, domain_size: int, generator: torch.Generator) -> torch.Tensor:
    """[TOKENS, TOPK]: any experts."""
    return torch.rand(TOKENS, ranks * EXPERTS_PER_RANK, generator=generator).argsort(1)[:, :TOPK].contiguous()


ROUTINGS = {"near": near, "uniform": uniform}


def run_once(ranks: int, domain_size: int, routing: str, calls: int) -> dict[str, float]:
    """Milliseconds of processor time of this process for each of `OPS`; of operations the mean of `calls`."""
    torch.set_num_threads(1)
    config = {
        "num_experts": EXPERTS_PER_RANK * ranks,
        "hidden": HIDDEN,
        "domain_size": domain_size,
        "backend": "host",
        "budget_bytes": BUDGET_BYTES,
        "arrival_timeout_s": TIMEOUT_S,
        "progress_timeout_s": TIMEOUT_S,
    }
    found = {}

    def timed(name: str, call: Callable[[], Any], times: int = 1) -> Any:
        before = time.process_time()
        for _ in range(times):
            value = call()
        found[name] = round(1e3 * (time.process_time() - before) / times, 3)
        return value

    with RankGroup(1, config | {"num_experts": 1}):
        pass  # what a process does once is no part of the growth
    group = timed("creation", lambda: RankGroup(ranks, config, timeout_s=TIMEOUT_S))
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generators[0]).bfloat16()
    idx_TK = [ROUTINGS[routing](rank, ranks, domain_size, generators[rank]) for rank in range(ranks)]
    weights_TK = torch.full((TOKENS, TOPK), 1 / TOPK)

    def dispatch(rank: int, buffer: Buffer) -> Any:
        return buffer.dispatch(x_TH, idx_TK[rank], weights_TK)

    def combine(rank: int, buffer: Buffer) -> None:
        buffer.combine(got[rank].rows, got[rank].handle)

    got = group.run(dispatch, timeout_s=TIMEOUT_S)
    group.run(combine, timeout_s=TIMEOUT_S)
    got = timed("dispatch", lambda: group.run(dispatch, timeout_s=TIMEOUT_S), calls)
    timed("combine", lambda: group.run(combine, timeout_s=TIMEOUT_S), calls)
    timed("close", group.close)
    return found


def slope(points: Mapping[int, float]) -> float:
    """The exponent of the ranks, by least squares over the logarithms of milliseconds by ranks."""
    logs = torch.tensor([[ranks, value] for ranks, value in points.items()], dtype=torch.float64).log()
    ranks, values = (logs - logs.mean(0)).unbind(1)
    return round(float((ranks * values).sum() / (ranks * ranks).sum()), 3)


def records_of(
    args: argparse.Namespace, runs: Mapping[int, Sequence[Mapping[str, float]]]
) -> list[report.Record]:
    """One record per operation. runs: by ranks."""
    about = {"system": "uccl_ep", "backend": "host", "routing": args.routing, "domain_size": args.domain_size}
    about |= {"hidden": HIDDEN, "tokens": TOKENS, "topk": TOPK}
    records = []
    for op in OPS:
        values = {ranks: [run[op] for run in of_ranks] for ranks, of_ranks in runs.items()}
        medians = {ranks: report.quantile(torch.tensor(ms), 0.5) for ranks, ms in values.items()}
        found = {"runs": args.runs, "calls": args.calls, "exponent": slope(medians)}
        records.append(
            about | {"op": f"growth of {op}"} | found | {"median_cpu_ms": medians, "cpu_ms": values}
        )
    return records


def measured(ranks: int, args: argparse.Namespace) -> dict[str, float]:
    """`run_once` in a process of its own. Raises RuntimeError if that fails."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", str(ranks)]
    for name in ("domain_size", "routing", "calls"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=RANKS, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--domain-size", type=RANKS, default=8)
    parser.add_argument("--routing", choices=ROUTINGS, default="near")
    parser.add_argument("--runs", type=RUNS, default=5)
    parser.add_argument("--calls", type=RUNS, default=3, help="of an operation in a run")
    parser.add_argument("--one", type=RANKS, help="run this number of ranks once, in this process")
    add_output(parser, "growth")
    args = parser.parse_args(argv)
    least = 2 * args.domain_size
    for ranks in args.ranks if args.one is None else [args.one]:
        if ranks % args.domain_size or ranks < least:
            name = "--ranks" if args.one is None else "--one"
            parser.error(
                f"{name} {ranks}: allowed are multiples of --domain-size {args.domain_size}, from {least} on"
            )
    if args.one is None and len(set(args.ranks)) < 2:
        parser.error(
            f"--ranks {args.ranks[0]}: allowed are two different numbers or more, of which growth is seen"
        )
    if args.one:
        print(json.dumps(run_once(args.one, args.domain_size, args.routing, args.calls)), flush=True)
        os._exit(0)  # threads of torch and gloo need not end first
    runs: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in args.ranks}
    for _, ranks in itertools.product(range(args.runs), args.ranks):
        runs[ranks].append(measured(ranks, args))
        print(f"{ranks:>4} ranks, ms: {runs[ranks][-1]}", flush=True)
    records = records_of(args, runs)
    for record in records:
        print(f"{record['op']:>20}: ranks^{record['exponent']}, ms by ranks {record['median_cpu_ms']}")
    report.write_results(records, args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
