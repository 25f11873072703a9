"""Bandwidth of dispatch + combine of `uccl_ep` and its peers, interleaved in one run.

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

import torch.distributed as dist

from bench import plot, report
from bench.cases import Case
from bench.deep_ep_peers import about_deep_ep
from bench.lineup import SYSTEMS, line_up
from bench.measure import measure, reserve_gpu_memory
from bench.options import cases_of, parse_args
from bench.peers import MegatronAllToAll, about_stock
from bench.ranks import Meeting, join_group, meeting, start_ranks


def run_case(
    case: Case, title: str, args: argparse.Namespace, meet: Meeting, about: report.Record
) -> list[report.Record]:
    """Collective. Prints the case's table on rank 0."""
    first = dist.get_rank() == 0
    if case.problem:
        records = report.records_of(case, [], {"all": case.problem}, about)
        if first:
            print(f"\n{title}\n{report.table(records)}", flush=True)
        return records
    started = time.monotonic()
    lineup = line_up(case, args.systems, backward=args.backward, compact=args.compact)
    progress = report.Progress(title, active=first)
    measured = measure(
        case, lineup, runs=args.runs, warmup=args.warmup, seed=args.seed, meet=meet, progress=progress
    )
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
    """Runs one rank."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")  # about packages that need a GPU
    join_group(args.share_gpus)
    meet = meeting()
    about = report.about_here(args.commit)
    if dist.get_rank() == 0 and "deep_ep" in (args.systems or SYSTEMS):
        print(about_deep_ep(), flush=True)
    reserve_gpu_memory()
    records = []
    cases = cases_of(args, dist.get_world_size())
    for index, case in enumerate(cases):
        records += run_case(case, f"[{index + 1}/{len(cases)}] {case}", args, meet, about)
        if dist.get_rank() == 0:
            report.write_json(records, Path(f"{args.out}.json"))
    if dist.get_rank() == 0:
        plot.write_png(records, Path(f"{args.out}.png"))
        print(f"\n{about['hardware']}, commit {about['commit']}")
        print(f"written: {args.out}.json and .png")
    meet.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main(argv: list[str]) -> int:
    args = parse_args(argv, str(__doc__).splitlines()[0])
    if dist.is_torchelastic_launched():
        return run_rank(args)
    problems = [case.problem for case in cases_of(args, args.ranks)]
    if all(problems):
        print("nothing to measure: " + "; ".join(dict.fromkeys(problems)), file=sys.stderr)
        return 2
    return start_ranks(args.ranks, Path(__file__), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
