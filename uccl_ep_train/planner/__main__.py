"""python -m uccl_ep_train.planner --sweep | --fit FOLDER | --trace FILE...: predictions, errors, rates."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from uccl_ep_train.common.command_line import number, output_file, run, whole
from uccl_ep_train.errors import EpError
from uccl_ep_train.planner import accuracy, report, traces
from uccl_ep_train.planner.machine import MACHINES
from uccl_ep_train.planner.shape import Router, Shape, read_trace
from uccl_ep_train.settings.checks import (
    HIDDEN_UNIT,
    MAX_EXPERTS,
    MAX_GPU_RANKS,
    MAX_HIDDEN,
    MAX_TOKENS,
    MAX_TOPK,
)

_MOST_MIB = 1 << 26
_MOST_SKEW = 100.0
_SLOW_S = 1.0
"""A sweep tells of each group that takes longer."""
_OF_SWEEP = {
    "ep": [8, 16, 32, 64, 128, 256],
    "domain_size": [8, 16],
    "experts": 256,
    "topk": 8,
    "groups": None,
    "group_topk": None,
    "tokens": 4096,
    "hidden": 7168,
    "dtype": "fp8",
    "hardware": "h200",
    "budget_mib": 3072,
    "skew": 0.0,
    "router_trace": None,
    "layer": 0,
    "picture": None,
}
"""Options of a sweep, and what they are by default. A fit and a trace follow none."""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m uccl_ep_train.planner", description=__doc__)
    ranks = whole(1, MAX_GPU_RANKS)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--sweep", action="store_true", help="groups of several sizes, as a table")
    what.add_argument(
        "--fit", type=Path, metavar="FOLDER", help="the folder bench: fits rates, prints errors"
    )
    what.add_argument("--trace", type=Path, nargs="+", metavar="FILE", help="of Buffer.trace: its rates")
    add = parser.add_argument_group("a sweep").add_argument
    add("--ep", type=ranks, nargs="+", help="ranks of a group")
    add("--domain-size", type=ranks, nargs="+")
    add("--experts", type=whole(1, MAX_EXPERTS))
    add("--topk", type=whole(1, MAX_TOPK))
    add("--groups", type=whole(1), help="of experts, for routing that is limited to some of them")
    add("--group-topk", type=whole(1))
    add("--tokens", type=whole(1, MAX_TOKENS), help="of a rank")
    add("--hidden", type=whole(HIDDEN_UNIT, MAX_HIDDEN, multiple=HIDDEN_UNIT))
    add("--dtype", choices=("fp8", "bf16"), help="of dispatched rows")
    add("--hardware", choices=sorted(MACHINES))
    add("--budget-mib", type=whole(1, _MOST_MIB))
    add("--skew", type=number(0, _MOST_SKEW), help="standard deviation of the experts' logits")
    add("--router-trace", type=Path, metavar="FILE", help="routing of recipes.launch --router-trace")
    add("--layer", type=whole(0), help="of the router's trace")
    add("--picture", type=output_file(".png"), metavar="FILE.png", help="of a sweep; needs matplotlib")
    args = parser.parse_args(argv)
    for name, usual in _OF_SWEEP.items():
        if getattr(args, name) is None:
            setattr(args, name, usual)
        elif not args.sweep:
            parser.error(f"--{name.replace('_', '-')} is for --sweep")
    if args.router_trace is None and args.layer:
        parser.error("--layer is for --router-trace")
    if args.router_trace is not None and args.skew:
        parser.error("--skew draws a routing, --router-trace has one: allowed is one of them")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.picture and find_spec("matplotlib") is None:
        print(f"--picture {args.picture}: the package matplotlib is not installed", file=sys.stderr)
        return 2
    try:
        if args.trace:
            for name, value in asdict(traces.read(args.trace)).items():
                print(f"{name:9s} {'not in the trace' if value is None else format(value, '.4g')}")
            return 0
        if args.fit:
            print(accuracy.text(args.fit))
            return 0
        return _sweep(args)
    except EpError as error:
        print(error, file=sys.stderr)
        return 2


def _sweep(args: argparse.Namespace) -> int:
    router = Router(
        num_experts=args.experts, topk=args.topk, num_groups=args.groups, group_topk=args.group_topk
    )
    router.check()
    machine, budget_bytes = MACHINES[args.hardware], args.budget_mib << 20

    def shape_of(num_ranks: int, domain_size: int) -> Shape:
        trace = None
        if args.router_trace is not None:
            trace = read_trace(args.router_trace, num_ranks * args.tokens, router, args.layer)
        return Shape.split(
            num_ranks, domain_size, router=router, tokens=args.tokens, hidden=args.hidden, dtype=args.dtype,
            skew=args.skew, trace=trace,
        )  # fmt: skip

    cells, began = [], time.monotonic()
    for cell in report.sweep(machine, shape_of, args.ep, args.domain_size, budget_bytes, args.tokens):
        cells.append(cell)
        took, began = time.monotonic() - began, time.monotonic()
        if took > _SLOW_S:
            said = f"{cell.ranks} ranks in domains of {cell.domain_size}: planned in {took:.0f} s"
            print(said, file=sys.stderr, flush=True)
    print(report.table(cells))
    last = next((cell.found for cell in reversed(cells) if cell.found), None)
    if last is None:
        print("no group of the sweep can be laid out", file=sys.stderr)
        return 2
    print("\n".join(report.caveats(last)))
    if args.picture:
        try:
            report.draw_sweep(cells, args.picture)
        except OSError as error:
            print(f"--picture {args.picture}: {error.strerror}", file=sys.stderr)
            return 1
        print(f"picture: {args.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
