"""Bandwidth of the libfabric transport over tcp against bare fi_writedata and fi_pingpong.

    python bench/ofi_bandwidth.py

Two processes on this host send in one direction, with several writes in flight. Our transport and the bare
loops take turns. The ratio is taken within a turn; the result is the median over turns. Our transport asks
for delivery completion, and so does `fi_writedata_delivered`. `fi_writedata` uses the provider's default
completion, which over tcp only says that the bytes are in the sender's socket. `fi_pingpong` runs after the
turns: it sends a message and waits for one of the same size. Its ratio is that of the medians.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence

import torch

from bench import report
from bench.bounds import RUNS, add_output
from uccl_ep_train.common.command_line import whole

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
MOST_BYTES = 1 << 30  # of all writes in flight together
SECONDS = 120.0  # the longest that a process may take
PINGPONG = "fi_pingpong"
PINGPONG_RUNS = 5
# Name of a system in the records -> its name in the program's output.
SYSTEMS = {"uccl_ep_ofi": "ours", "fi_writedata": "raw", "fi_writedata_delivered": "raw_delivered"}


class CannotRun(RuntimeError):
    """Something is missing on this machine, or a program failed."""


def output_of(command: Sequence[str | Path]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        raise CannotRun(f"{command[0]} took more than {SECONDS:.0f} s") from late
    if done.returncode != 0:
        raise CannotRun(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def build(folder: Path) -> Path:
    """Compiles the measuring program. Raises `CannotRun`."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotRun("g++ is not on the path")
    folders = ("common", "transport", "transport/ofi")
    sources = [source for name in folders for source in sorted((CSRC / name).glob("*.cc"))]
    program = folder / "ofi_bandwidth"
    source = Path(__file__).with_suffix(".cc")
    output_of(
        [
            compiler,
            "-std=c++20",
            "-O3",
            f"-I{CSRC}",
            source,
            *sources,
            "-o",
            program,
            "-ldl",
            "-lrt",
            "-pthread",
        ]
    )
    return program


def pingpong(size: int, count: int) -> float:
    """10^9 bytes per second of fi_pingpong, whose directions take turns. Raises `CannotRun`."""
    program = shutil.which("fi_pingpong")
    if program is None:
        raise CannotRun("fi_pingpong is not on the path")
    command = [program, "-p", "tcp;ofi_rxm", "-e", "rdm", "-S", str(size), "-I", str(count)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for attempt in range(10):  # until the server listens
            time.sleep(0.5)
            try:
                text = output_of([*command, "127.0.0.1"])
                break
            except CannotRun:
                if attempt == 9:
                    raise
    finally:
        server.kill()
        server.wait()
    found = re.search(r"^\S+\s+\d+\s+=?\S+\s+\S+\s+\S+\s+([\d.]+)\s", text, re.MULTILINE)
    if found is None:
        raise CannotRun(f"no figure in fi_pingpong's output: {text}")
    return float(found.group(1)) / 1e3


def measure(program: Path, args: argparse.Namespace) -> list[report.Record]:
    rates: dict[str, list[float]] = {name: [] for name in (*SYSTEMS, PINGPONG)}
    names = {called: name for name, called in SYSTEMS.items()}
    numbers = [str(number) for number in (args.size, args.window, args.count, args.turns)]
    for line in output_of([str(program), *numbers]).splitlines():
        _, called, rate = line.split()
        rates[names[called]].append(float(rate))
    refused = ""
    try:
        rates[PINGPONG] = [pingpong(args.size, args.count) for _ in range(PINGPONG_RUNS)]
    except CannotRun as reason:
        refused = str(reason)
    ours = torch.tensor(rates["uccl_ep_ofi"], dtype=torch.float64)
    records = []
    for system, found in rates.items():
        record: report.Record = {
            "system": system,
            "op": "write",
            "provider": "tcp",
            "size_bytes": args.size,
            "window_writes": 1 if system == PINGPONG else args.window,
            "runs": len(found),
        }
        if found:
            these = torch.tensor(found, dtype=torch.float64)
            record |= {
                f"{name}_gbytes_per_s": round(float(these.quantile(q)), 3)
                for name, q in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))
            }
            same_turn = len(found) == len(ours)
            ratio = (ours / these).median() if same_turn else ours.median() / these.median()
            record["ours_over_this"] = round(float(ratio), 3)
        else:
            record["not_run"] = refused
        records.append(record)
    return records


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--size", type=whole(1, MOST_BYTES), default=256 << 10, help="bytes of a write")
    parser.add_argument("--window", type=whole(1, 1 << 16), default=16, help="writes in flight")
    parser.add_argument("--count", type=RUNS, default=100, help="writes per turn")
    parser.add_argument("--turns", type=RUNS, default=200)
    add_output(parser, "ofi_tcp")
    args = parser.parse_args(argv)
    if args.size * args.window > MOST_BYTES:
        parser.error(
            f"--window {args.window}: allowed is 1 .. {MOST_BYTES // args.size}, of --size {args.size}"
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            records = measure(build(Path(folder)), args)
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 2
    for record in records:
        if "ours_over_this" in record:
            rate = record["median_gbytes_per_s"]
            print(f"ours is {record['ours_over_this']:.2f} x {record['system']} ({rate} GB/s)")
        else:
            print(f"{record['system']} did not run: {record['not_run']}")
    report.write_results(records, args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
