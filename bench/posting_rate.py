"""How many chunk commands a proxy thread ships in a second through the loop transport, with empty chunks.

    python bench/posting_rate.py

`bench/posting_rate.cc` explains what is timed: processor time, not wall time. It is compiled as the product
is. The goal is 2 million commands a second.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import itertools
import tempfile

import torch

from bench import report
from bench.bounds import add_output
from tests.native import building
from uccl_ep_train.common.command_line import seconds

WINDOWS = (16, 64, 256, 1024)  # chunks in flight at most
SECONDS = 1.0
RUNS = 5


def build(folder: Path) -> Path:
    source = Path(__file__).with_suffix(".cc")
    return building.link(folder / "posting_rate", [source, *building.product_sources()], building.PRODUCT)


def measure(program: Path, window: int, threads: int, seconds: float) -> tuple[float, float]:
    """Commands a second in the sender's proxy, arrivals a second in the receiver's; raises RuntimeError."""
    result = building.run([program, str(seconds), str(window), str(threads)], timeout=60 + 10 * seconds)
    if result.returncode:
        raise RuntimeError(f"posting_rate, window of {window} chunks: {result.stderr}")
    commands, sender_s, receiver_s = map(float, result.stdout.split())
    return commands / sender_s, commands / receiver_s


def record_of(program: Path, window: int, threads: int, seconds: float) -> report.Record:
    measured = [measure(program, window, threads, seconds) for _ in range(RUNS)]
    runs = torch.tensor(measured, dtype=torch.float64)
    shipped, landed = runs.unbind(1)
    return {
        "system": "uccl_ep",
        "op": "posting_rate",
        "transport": "loop",
        "chunk_bytes": 0,
        "window_chunks": window,
        "threads": threads,
        "runs": RUNS,
        "seconds": seconds,
        "commands_per_s": round(float(shipped.median())),
        "least_commands_per_s": round(float(shipped.min())),
        "arrivals_per_s": round(float(landed.median())),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add_output(parser, "posting_rate")
    parser.add_argument("--seconds", type=seconds(3600), default=SECONDS, help="of each run")
    args = parser.parse_args(argv)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for threads, window in itertools.product((1, 2), WINDOWS):
            records.append(record_of(program, window, threads, args.seconds) | report.about_here(args.commit))
            last = records[-1]
            rates = [
                last[name] / 1e6 for name in ("commands_per_s", "least_commands_per_s", "arrivals_per_s")
            ]
            print(
                f"{threads} threads, window of {window:>4} chunks, millions a second: "
                f"{rates[0]:5.2f} commands in the sender's proxy (least {rates[1]:.2f}), "
                f"{rates[2]:5.2f} arrivals in the receiver's",
                flush=True,
            )
    report.write_json(records, Path(f"{args.out}.json"))
    print(f"written: {args.out}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
