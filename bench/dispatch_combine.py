"""Bandwidth of dispatch + combine, ours and its peers', interleaved in one run.

    python bench/dispatch_combine.py                                   starts 4 ranks on this host
    torchrun --nproc_per_node=4 bench/dispatch_combine.py --tokens 128 1024

Times whole calls from raw BF16 hidden states and the router's top-k to rows ready for the experts, and back.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path

if __package__ in (None, ""):  # started by its path, as torchrun does
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from bench import report
from bench.cases import ROUTINGS, Case
from bench.measure import measure
from bench.memcpy import Memcpy
from bench.peers import BareAllToAll, MegatronAllToAll, about_stock
from bench.systems import System, UcclEp
from uccl_ep_train import env

SYSTEMS = ("uccl_ep", "cached_plan", "megatron", "bare", "memcpy")
RESULTS = Path(__file__).resolve().parent / "results"


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/dispatch_combine.py", description=__doc__.splitlines()[0])
    sweep = parser.add_argument_group("the sweep: every combination of")
    sweep.add_argument("--tokens", type=int, nargs="+", default=[1024], help="per rank")
    sweep.add_argument("--hidden", type=int, nargs="+", default=[1024])
    sweep.add_argument("--topk", type=int, nargs="+", default=[4])
    sweep.add_argument("--experts", type=int, nargs="+", default=[32], help="of the whole group")
    sweep.add_argument("--domains", type=int, nargs="+", default=[1, 2], help="the ranks are split into")
    sweep.add_argument(
        "--dtype", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"], help="of dispatch"
    )
    sweep.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    sweep.add_argument("--link-gbytes-per-s", type=float, nargs="+", default=[0.0], help="0: unlimited")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--runs", type=int, default=20, help="counted runs, each with another routing")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="to start when not under torchrun")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "dispatch_combine",
        help="where to write, without .json and .png",
    )
    return parser.parse_args(argv)


def cases_of(args: argparse.Namespace, num_ranks: int) -> list[Case]:
    """The sweep; splits that do not come out even are left out."""
    names = ("domains", "dtype", "routing", "link_gbytes_per_s", "hidden", "experts", "topk", "tokens")
    combinations = itertools.product(*(getattr(args, name) for name in names))
    cases = [Case(ranks=num_ranks, **dict(zip(names, values, strict=True))) for values in combinations]
    return [
        case
        for case in cases
        if not (case.ranks % case.domains or case.experts % case.ranks or case.topk > case.experts)
    ]


def run_case(case: Case, args: argparse.Namespace) -> list[report.Record]:
    """Collective. Prints the case's table on rank 0."""
    first = dist.get_rank() == 0
    buffer = UcclEp.create_buffer(case)
    systems: list[System] = []
    if "uccl_ep" in args.systems:
        systems.append(UcclEp(buffer, case.dtype, cached=False))
    if "cached_plan" in args.systems:
        systems.append(UcclEp(buffer, case.dtype, cached=True))
    if buffer.device.type == "cuda" and case.dtype == "fp8":
        systems += [UcclEp(buffer, "fp8", cached=cached, fp8_rows=True) for cached in (False, True)]
    if "megatron" in args.systems:
        systems.append(MegatronAllToAll(case))
    if "bare" in args.systems:
        systems.append(BareAllToAll(case))
    if "memcpy" in args.systems and not torch.cuda.is_available():
        systems.append(Memcpy(case))
    started = time.monotonic()
    progress = report.Progress(str(case), active=first)
    measured = measure(case, systems, runs=args.runs, warmup=args.warmup, seed=args.seed, progress=progress)
    records = report.records_of(case, measured)
    if first:
        print(f"\n{case}; {args.runs} runs, {time.monotonic() - started:.1f} s")
        print(report.table(records))
        for line in (report.steps_table(records), *report.paired_ratios(measured)):
            if line:
                print(line)
        if "megatron" in args.systems:
            print("  " + about_stock(systems[[s.name for s in systems].index("megatron_alltoall")]))
        sys.stdout.flush()
    buffer.close()
    for system in systems:
        if not isinstance(system, UcclEp):
            system.close()
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
    records = []
    for case in cases_of(args, dist.get_world_size()):
        records += run_case(case, args)
        if dist.get_rank() == 0:
            report.write_json(records, args.out.with_suffix(".json"))
    if dist.get_rank() == 0:
        report.write_png(records, args.out.with_suffix(".png"))
        print(f"\n{report.hardware()}, commit {report.commit()}")
        print(f"written: {args.out}.json and .png")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def start_ranks(num_ranks: int, argv: list[str]) -> int:
    """This program on `num_ranks` ranks of this host, under torchrun's agent; its exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # gloo looks for an address by the host's name, which not every machine resolves.
    env.set_default("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, run_id="bench", monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(str(Path(__file__).resolve()), *argv)
    except ChildFailedError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if dist.is_torchelastic_launched():
        return run_rank(args)
    if not cases_of(args, args.ranks):
        print("nothing to measure: ranks must be a multiple of domains, experts of ranks", file=sys.stderr)
        return 2
    return start_ranks(args.ranks, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
