"""The command line, and the cases that it asks for."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from bench.bounds import (
    EXPERTS,
    GBYTES_PER_S,
    HIDDEN,
    RANKS,
    RUNS,
    SEED,
    SMS,
    TOKENS,
    TOPK,
    WARMUP,
    add_output,
)
from bench.cases import FORMS, ROUTINGS, Case
from bench.lineup import SYSTEMS
from bench.ranks import parse
from bench.trace import BUNDLED, TraceError, load_trace

DEFAULT_TOPK = 4
DEFAULT_EXPERTS = 32

# Options on the command line override the preset.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"tokens": [128], "domains": [1], "dtype": ["fp8"], "runs": 5, "warmup": 1},
    "ht": {
        "tokens": [128, 512, 1024, 2048, 4096, 8192],
        "hidden": [7168],
        "topk": [8],
        "experts": [256],
        "domains": [1],
        "dtype": ["fp8", "bf16"],
        "routing": ["uniform"],
        "num_sms": [24],
        "stage_sms": [0, 100],  # all SMs of an H200 but 32, which stay free
    },
}


def parse_args(argv: list[str], about: str = "") -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/dispatch_combine.py", description=about)
    parser.add_argument("--preset", choices=PRESETS, help="quick: a look; ht: the high-throughput sweep")
    sweep = parser.add_argument_group("the sweep: every combination of")
    sweep.add_argument("--tokens", type=TOKENS, nargs="+", default=[1024], help="per rank")
    sweep.add_argument("--hidden", type=HIDDEN, nargs="+", default=[1024])
    sweep.add_argument("--topk", type=TOPK, nargs="+", help=f"default: {DEFAULT_TOPK}, or the trace's")
    sweep.add_argument(
        "--experts", type=EXPERTS, nargs="+", help=f"of the group; default: {DEFAULT_EXPERTS}, or the trace's"
    )
    sweep.add_argument("--domains", type=RANKS, nargs="+", default=[1, 2], help="the ranks are split into")
    sweep.add_argument(
        "--dtype", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"], help="of dispatch"
    )
    sweep.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    sweep.add_argument(
        "--form", nargs="+", choices=FORMS, default=["topk"], help="of the routing that we are given"
    )
    sweep.add_argument("--num-sms", type=SMS, nargs="+", default=[0], help="GPU only; 0: each system's own")
    sweep.add_argument(
        "--stage-sms", type=SMS, nargs="+", default=[0], help="our staging alone, GPU only; 0: as --num-sms"
    )
    sweep.add_argument(
        "--link-gbytes-per-s", type=GBYTES_PER_S, nargs="+", default=[0.0], help="0: unlimited"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.npz",
        help="for --routing trace, from recipes.launch --router-trace; default: bench/traces/tiny_host.npz",
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: all that can run here")
    parser.add_argument("--backward", action="store_true", help="time forward + backward of both, too")
    parser.add_argument("--compact", action="store_true", help="ours with compact rows, too")
    parser.add_argument("--runs", type=RUNS, default=20, help="counted runs, each with another routing")
    parser.add_argument("--warmup", type=WARMUP, default=2, help="runs before them; one more compares")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--ranks", type=RANKS, default=4, help="to start when not under torchrun")
    add_output(parser, "dispatch_combine", ".png")
    preset = parser.parse_known_args(argv)[0].preset
    if preset:
        parser.set_defaults(**PRESETS[preset])
    args = parse(parser, argv)
    if args.trace is None:
        args.trace = BUNDLED
    elif "trace" not in args.routing:
        parser.error(f"--trace {args.trace} without --routing trace; allowed is both")
    try:
        load_trace(str(args.trace))
    except TraceError as error:
        parser.error(f"--trace {error}")
    return args


def cases_of(args: argparse.Namespace, num_ranks: int) -> list[Case]:
    """All cases of the sweep, also those that cannot run (`Case.problem`)."""
    cases = []
    axes = ("domains", "num_sms", "stage_sms", "dtype", "routing", "form", "link_gbytes_per_s", "hidden")
    for values in itertools.product(*(getattr(args, name) for name in axes)):
        chosen = dict(zip(axes, values, strict=True))
        topk, experts = DEFAULT_TOPK, DEFAULT_EXPERTS
        if chosen["routing"] == "trace":
            chosen["trace"] = str(args.trace)
            topk, experts = load_trace(str(args.trace)).topk, load_trace(str(args.trace)).num_experts
        for e, k, t in itertools.product(args.experts or [experts], args.topk or [topk], args.tokens):
            cases.append(Case(ranks=num_ranks, experts=e, topk=k, tokens=t, **chosen))
    return cases
