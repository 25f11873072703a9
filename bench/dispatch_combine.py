"""Bandwidth of dispatch + combine, ours and its peers', interleaved in one run.

    python bench/dispatch_combine.py                                   starts 4 ranks on this host
    torchrun --nproc_per_node=4 bench/dispatch_combine.py --tokens 128 1024

Times whole calls from raw BF16 hidden states and the router's top-k to rows ready for the experts, and back.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

if __package__ in (None, ""):  # started by its path, as torchrun does
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse

import torch
import torch.distributed as dist

from bench import plot, report
from bench.cases import Case
from bench.deep_ep_peers import about_deep_ep
from bench.lineup import line_up
from bench.measure import measure, reserve_gpu_memory
from bench.options import cases_of, parse_args
from bench.peers import MegatronAllToAll, about_stock
from bench.trace import TraceError
from uccl_ep_train import env


def run_case(case: Case, title: str, args: argparse.Namespace, about: report.Record) -> list[report.Record]:
    """Collective. Prints the case's table on rank 0."""
    first = dist.get_rank() == 0
    if case.problem:
        records = report.records_of(case, [], {"all": case.problem}, about)
        if first:
            print(f"\n{title}\n{report.table(records)}", flush=True)
        return records
    started = time.monotonic()
    lineup = line_up(case, args.systems, backward=args.backward)
    progress = report.Progress(title, active=first)
    measured = measure(case, lineup, runs=args.runs, warmup=args.warmup, seed=args.seed, progress=progress)
    records = report.records_of(case, measured, lineup.refused, about)
    if first:
        print(f"\n{title}; {args.runs} runs, {time.monotonic() - started:.1f} s")
        print(report.table(records))
        for line in (report.steps_table(records), *report.paired_ratios(measured)):
            if line:
                print(line)
        for system in lineup.systems:
            if isinstance(system, MegatronAllToAll):
                print("  " + about_stock(system))
        sys.stdout.flush()
    lineup.close()
    return records


def run_rank(args: argparse.Namespace) -> int:
    """One rank's whole life."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")  # about packages that a CPU cannot have
    torch.set_num_threads(1)  # the ranks share the host's cores
    torch.set_grad_enabled(False)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(env.read("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    about = report.about_here(args.commit)
    if dist.get_rank() == 0 and "deep_ep" in args.systems:
        print(about_deep_ep(), flush=True)
    reserve_gpu_memory()
    records = []
    cases = cases_of(args, dist.get_world_size())
    for index, case in enumerate(cases):
        records += run_case(case, f"[{index + 1}/{len(cases)}] {case}", args, about)
        if dist.get_rank() == 0:
            report.write_json(records, Path(f"{args.out}.json"))
    if dist.get_rank() == 0:
        plot.write_png(records, Path(f"{args.out}.png"))
        print(f"\n{about['hardware']}, commit {about['commit']}")
        print(f"written: {args.out}.json and .png")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def start_ranks(num_ranks: int, argv: list[str], program: Path = Path(__file__)) -> int:
    """A program on `num_ranks` ranks of this host, under torchrun's agent; its exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # gloo looks for an address by the host's name, which not every machine resolves.
    env.set_default("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, run_id="bench", monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(str(program.resolve()), *argv)
    except ChildFailedError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str]) -> int:
    args = parse_args(argv, str(__doc__).splitlines()[0])
    if dist.is_torchelastic_launched():
        return run_rank(args)
    try:
        problems = [case.problem for case in cases_of(args, args.ranks)]
    except TraceError as error:
        problems = [str(error)]
    if all(problems):
        print("nothing to measure: " + "; ".join(dict.fromkeys(problems)), file=sys.stderr)
        return 2
    return start_ranks(args.ranks, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
