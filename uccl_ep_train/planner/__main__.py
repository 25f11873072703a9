"""python -m uccl_ep_train.planner --sweep | --fit FOLDER | --trace FILE...: predictions, errors, rates."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from uccl_ep_train.errors import EpError
from uccl_ep_train.planner import accuracy, report, traces
from uccl_ep_train.planner.machine import MACHINES
from uccl_ep_train.planner.shape import Router, Shape


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m uccl_ep_train.planner", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--sweep", action="store_true", help="groups of several sizes, as a table")
    what.add_argument(
        "--fit", type=Path, metavar="FOLDER", help="the folder bench: fits rates, prints errors"
    )
    what.add_argument("--trace", type=Path, nargs="+", metavar="FILE", help="of Buffer.trace: its rates")
    parser.add_argument(
        "--ep", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help="ranks of a group"
    )
    parser.add_argument("--domain-size", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--groups", type=int, help="of experts, for routing that is limited to some of them")
    parser.add_argument("--group-topk", type=int)
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8", help="of dispatched rows")
    parser.add_argument("--hardware", choices=sorted(MACHINES), default="h200")
    parser.add_argument("--budget-mib", type=int, default=3072)
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="of a sweep; needs matplotlib")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
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
        router = Router(
            num_experts=args.experts, topk=args.topk, num_groups=args.groups, group_topk=args.group_topk
        )
        base = Shape(domains=(1,), router=router, tokens=args.tokens, hidden=args.hidden, dtype=args.dtype)
        cells = report.sweep(
            MACHINES[args.hardware], base, args.ep, args.domain_size, args.budget_mib << 20, args.tokens
        )
    except EpError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.table(cells))
    last = next((cell.found for cell in reversed(cells) if cell.found), None)
    if last:
        print("\n".join(report.caveats(last)))
    if args.picture:
        report.draw_sweep(cells, args.picture)
        print(f"picture: {args.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
