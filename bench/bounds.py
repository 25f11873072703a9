"""What the options of measuring programs may be, and those that all of them have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from recipes.launch import MOST_SEED
from uccl_ep_train import EpConfig, memory_plan
from uccl_ep_train.common.command_line import number, output_file, refused, whole
from uccl_ep_train.errors import EpError
from uccl_ep_train.settings import env
from uccl_ep_train.settings.checks import (
    HIDDEN_UNIT,
    MAX_EXPERTS,
    MAX_HIDDEN,
    MAX_RANKS,
    MAX_TOKENS,
    MAX_TOPK,
)

RESULTS = Path(__file__).resolve().parent / "results"

TOKENS = whole(1, MAX_TOKENS)
HIDDEN = whole(HIDDEN_UNIT, MAX_HIDDEN, multiple=HIDDEN_UNIT)
TOPK = whole(1, MAX_TOPK)
EXPERTS = whole(1, MAX_EXPERTS)
RANKS = whole(1, MAX_RANKS)
SMS = whole(0, 1024)
MOST_RUNS = 1_000_000
RUNS = whole(1, MOST_RUNS)
WARMUP = whole(0, MOST_RUNS)
SEED = whole(0, MOST_SEED)
GBYTES_PER_S = number(0, 1e6)


def add_output(parser: argparse.ArgumentParser, name: str, *suffixes: str) -> None:
    """--commit and --out. suffixes: of the files beside .json"""
    parser.add_argument("--commit", default="", help="to record; default: $BENCH_COMMIT, else git's")
    endings = (".json", *suffixes)
    parser.add_argument(
        "--out",
        type=_base(endings),
        default=RESULTS / name,
        help=f"where to write, without {' and '.join(endings)}; default: {name} in bench/results",
    )


def _base(endings: tuple[str, ...]) -> Callable[[str], Path]:
    """Of files that can be written, whose folders are made."""

    def parse(text: str) -> Path:
        path, writable = Path(text), output_file(makes_folders=True)
        if path.name in ("", "..") or path.suffix in endings:
            raise refused(text, f"a file's name without {' and '.join(endings)}")
        for ending in endings:
            writable(f"{path}{ending}")
        return path

    return parse


def num_ranks(args: argparse.Namespace) -> int:
    """Those that torchrun has started, else --ranks."""
    return int(env.read("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else args.ranks


def refuse_config(
    parser: argparse.ArgumentParser, asked: str, config: Callable[[], EpConfig], ranks: int
) -> None:
    """Ends the program if so many ranks cannot make a buffer of this config. asked: the options"""
    try:
        memory_plan(config(), ranks)
    except EpError as error:
        parser.error(f"{asked}: {error}")


def refuse_split(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program if --domains does not divide the ranks."""
    if num_ranks(args) % args.domains:
        parser.error(f"--domains {args.domains}: allowed is a divisor of the {num_ranks(args)} ranks")
