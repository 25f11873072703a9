"""Starts ranks as Ray's actors: the doctor first, then a program, each rank a process of its own.

    python scripts/ray/train.py --ranks 16 --gpus-per-rank 1 --cpus-per-rank 8 -- \\
        recipes.launch --recipe NAME --hardware H --megatron-lm PATH --data-path ...

Ray gives each actor a GPU and no LOCAL_RANK, or 0 everywhere. Here ranks that are on one host get consecutive
numbers, see all GPUs of their job there, and LOCAL_RANK says which is theirs: as under torchrun. With
--isolate each sees its own GPU only, and LOCAL_RANK stays 0 everywhere; the doctor says whether that works.

--export NAME (any number) passes a variable of this shell on to the ranks, beside all UCCL_*, NCCL_*, GLOO_*
and FI_*.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import ray
except ModuleNotFoundError:
    ray = None

from uccl_ep_train.common.command_line import number, whole
from uccl_ep_train.settings.checks import MAX_RANKS

MOST = 4096
"""CPUs or GPUs of a rank."""
PASSED_ON = ("UCCL_", "NCCL_", "GLOO_", "FI_")
GRACE_S = 60.0
"""Between the first rank that ends with an error and the end of all: time for the others to say why."""


class Where(NamedTuple):
    """Of an actor: its host's address, and the GPUs that Ray has given it there."""

    host: str
    gpus: tuple[str, ...]


class Rank:
    """An actor. It runs programs and does nothing else, so that each begins in a clean process."""

    def where(self) -> Where:
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Where(ray.util.get_node_ip_address(), tuple(gpus))

    def free_port(self) -> int:
        with socket.socket() as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])

    def run(self, environment: dict[str, str], arguments: list[str]) -> int:
        """The program's exit status. Its output goes where Ray sends that of actors: to the driver."""
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, env=os.environ | environment, check=False).returncode


def environments(places: list[Where], *, isolate: bool) -> tuple[list[int], list[dict[str, str]]]:
    """The order of the actors as ranks, and what each rank is told of itself."""
    hosts = list(dict.fromkeys(place.host for place in places))
    # Ranks of one host share its memory: they have to follow each other.
    order = sorted(range(len(places)), key=lambda actor: (hosts.index(places[actor].host), actor))
    told = []
    for rank, actor in enumerate(order):
        host, gpus = places[actor]
        neighbours = [other for other in order if places[other].host == host]
        local = {"LOCAL_RANK": "0" if isolate else str(neighbours.index(actor))}
        local["LOCAL_WORLD_SIZE"] = str(len(neighbours))
        if gpus and not isolate:
            every = [gpu for other in neighbours for gpu in places[other].gpus]
            local["CUDA_VISIBLE_DEVICES"] = ",".join(every)
        # What programs look at to see that somebody has started their ranks.
        told.append(
            {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "TORCHELASTIC_RUN_ID": "ray", **local}
        )
    return order, told


def run_all(
    ranks: list[Any], told: list[dict[str, str]], common: dict[str, str], arguments: list[str]
) -> int:
    """The first exit status that is not 0, or 0. Ranks that outlive one that failed are ended."""
    meeting = {
        "MASTER_ADDR": ray.get(ranks[0].where.remote()).host,
        "MASTER_PORT": str(ray.get(ranks[0].free_port.remote())),
    }
    left = {
        rank.run.remote(common | meeting | own, arguments): number
        for number, (rank, own) in enumerate(zip(ranks, told, strict=True))
    }
    failed, patience = 0, None
    while left:
        done, _ = ray.wait(list(left), timeout=patience)
        if not done:
            print(f"ranks {sorted(left.values())} have not ended and are given up", file=sys.stderr)
            break
        number = left.pop(done[0])
        try:
            status = ray.get(done[0])
        except ray.exceptions.RayError as error:
            print(f"rank {number} was lost: {error}", file=sys.stderr)
            status = 1
        if status and not failed:
            print(f"rank {number} ended with status {status}", file=sys.stderr)
            failed, patience = status, GRACE_S
    return failed


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--ranks", type=whole(1, MAX_RANKS), required=True)
    parser.add_argument("--gpus-per-rank", type=number(0, MOST), default=1, help="0: on the CPU (1)")
    parser.add_argument("--cpus-per-rank", type=number(0, MOST), default=8, help="(8)")
    parser.add_argument("--isolate", action="store_true", help="each sees its own GPU only, LOCAL_RANK is 0")
    parser.add_argument("--export", action="append", default=[], metavar="NAME")
    parser.add_argument("--no-doctor", action="store_true")
    parser.add_argument("program", nargs="+", help="a module and its arguments, after --")
    args = parser.parse_args(argv)
    gpus = args.gpus_per_rank
    if gpus > 1 and gpus != int(gpus):
        parser.error(f"--gpus-per-rank {gpus:g}: allowed is a part of a GPU, or a whole number")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if ray is None:
        print("ray is not installed here: pip install ray", file=sys.stderr)
        return 2
    ray.init(log_to_driver=True)
    # Hosts are filled one after the other.
    group = ray.util.placement_group(
        [{"CPU": args.cpus_per_rank, **({"GPU": args.gpus_per_rank} if args.gpus_per_rank else {})}]
        * args.ranks,
        strategy="PACK",
    )
    ray.get(group.ready())
    actor = ray.remote(Rank).options(
        num_cpus=args.cpus_per_rank,
        num_gpus=args.gpus_per_rank,
        scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group),
    )
    actors = [actor.remote() for _ in range(args.ranks)]
    order, told = environments(ray.get([entry.where.remote() for entry in actors]), isolate=args.isolate)
    ranks = [actors[number] for number in order]
    common = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PASSED_ON) or name in ("PYTHONPATH", *args.export)
    }
    programs = [args.program] if args.no_doctor else [["uccl_ep_train.doctor"], args.program]
    for program in programs:
        status = run_all(ranks, told, common, program)
        if status:
            print(f"{program[0]} failed", file=sys.stderr)
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
