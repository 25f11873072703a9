"""Rate and round trip of the command queue from a GPU to a thread of the host.

    python bench/command_queue.py

One thread of a kernel pushes, one thread of the host takes. A step's chunks need a few hundred commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse

import torch

from bench import report
from bench.bounds import add_output
from uccl_ep_train.core import cuda
from uccl_ep_train.core.native import load_native

CAPACITIES = (64, 1024, 16384)  # commands
COMMANDS = 2_000_000


def measure(capacity: int) -> report.Record:
    """One record. Raises RuntimeError if a command that was taken differs from the one that was pushed."""
    found = load_native().measure_gpu_queue(torch.cuda.current_device(), capacity, COMMANDS)
    if found["wrong"]:
        raise RuntimeError(f"{found['wrong']} of {COMMANDS} commands came out wrong")
    trips = torch.tensor(found["round_trip_usec"], dtype=torch.float64)
    return {
        "system": "uccl_ep",
        "op": "command_queue",
        "capacity": capacity,
        "commands_per_s": round(found["commands_per_s"]),
        **{
            f"{name}_us": report.quantile(trips, q)
            for name, q in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))
        },
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add_output(parser, "command_queue")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or not cuda.built():
        print(
            "the command queue of GPUs needs a GPU, and an extension that was built with nvcc",
            file=sys.stderr,
        )
        return 2
    records = []
    for capacity in CAPACITIES:
        records.append(measure(capacity) | report.about_here(args.commit))
        last = records[-1]
        print(
            f"ring of {capacity:>6}: {last['commands_per_s'] / 1e6:5.2f} M commands/s, round trip "
            f"{last['median_us']} us (p10 {last['p10_us']}, p90 {last['p90_us']})",
            flush=True,
        )
    report.write_json(records, Path(f"{args.out}.json"))
    print(f"written: {args.out}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
