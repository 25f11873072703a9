"""A whole dispatch and combine, forward and backward, between domains of processes.

    python tests/conformance/two_domains.py --transport verbs --nics rxe0,rxe1

Random routings in FP8 and BF16, and a low-latency dispatch and combine, each compared bit for bit with the
oracle. A line for each case, then a summary; the exit code is 0 only if all are right, rows did cross
between the domains, and a flipped bit is
noticed. `scripts/soft_roce.sh` runs it in an emulated machine, where importing torch takes half a minute:
the ranks are forked from one process that has imported everything, and the oracle works once, before that.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
# Before numpy and torch start threads: what is forked must have one only, and cores are few.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch  # noqa: E402

from tests.bits import bit_difference, flip_bit  # noqa: E402
from tests.cases import Case, EngineSpec, Expected, differences, expect, make_case, run_case  # noqa: E402
from tests.low_latency import ROOM, Given, give, slot_differences  # noqa: E402
from tests.low_latency import E as EXPERTS  # noqa: E402
from tests.masks import lose  # noqa: E402
from tests.process_ranks import ProcessRanks, Rank  # noqa: E402
from uccl_ep_train import Buffer, EpConfig, LowLatency  # noqa: E402
from uccl_ep_train.oracle.low_latency import Slots  # noqa: E402

# What torch imports with the first backward (sympy!), and a buffer when it is made: once, before forking.
for name in ("torch.fx.experimental.symbolic_shapes", "uccl_ep_train._native"):
    importlib.import_module(name)

SETTINGS: dict[str, Any] = {
    "backend": "host",
    "budget_bytes": 16 << 20,
    # An emulated core is slow. Not longer: a NIC retries a few times within it, and sits out one of these
    # pauses when the last packet of a message is lost.
    "arrival_timeout_s": 120.0,
    "progress_timeout_s": 30.0,
}
CREATION_TIMEOUT_S = 180.0
CASE_TIMEOUT_S = 240.0
HIDDEN = 1024
MAX_TOKENS = 64


@dataclass(frozen=True)
class Job:
    """A case and what is expected of it."""

    case: Case
    expected: Expected


def make_job(seed: int, spec: EngineSpec) -> Job:
    """FP8 and BF16, top-k and maps by turns; routing, numbers of tokens and all else are drawn."""
    wire = ("fp8", "bf16")[seed % 2]
    form = ("topk", "map")[seed // 2 % 2]
    case = make_case(
        seed,
        spec,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        dispatch_dtype=wire,
        grad_dtype=wire,
        form=form,
        focus="spread",
        drop_rate=0.1,
        density=0.3,
        max_tokens=MAX_TOKENS,
    )
    return Job(case, expect(case))


@dataclass(frozen=True)
class LowLatencyJob:
    """Inputs of all ranks; by rank what comes and the sums."""

    given: Given
    slots: list[Slots]
    sums: list[torch.Tensor]

    @classmethod
    def make(cls, spec: EngineSpec) -> LowLatencyJob:
        given = give(spec)
        return cls(given, given.sent("fp8"), given.sums(spec))

    def differences(self, rank: int, buffer: Buffer) -> list[str]:
        x, topk_idx, topk_weights, outputs = self.given.on(rank, buffer.device)
        calls = LowLatency(buffer)
        got = calls.send_dispatch(x, topk_idx, wire="fp8").receive()
        out = calls.send_combine(outputs, topk_idx, topk_weights, got.handle).receive()
        sums = bit_difference(out, self.sums[rank])
        return slot_differences(got, self.slots[rank]) + ([f"sums: {sums}"] if sums else [])


def work(
    rank: Rank, jobs: list[Job], low_latency: LowLatencyJob, configs: list[EpConfig]
) -> dict[str, float]:
    """What a rank does: all cases on one buffer, telling what differs. Returns the buffer's statistics."""
    with Buffer(rank.group, configs[rank.rank]) as buffer:
        rank.mark("created")
        for i, job in enumerate(jobs):
            observed = run_case(job.case, job.expected, rank.rank, buffer)
            rank.mark(f"case {i}", differences(job.case, job.expected, rank.rank, observed))
            if i == 0:
                spoilt = replace(observed, out=flip_bit(observed.out), rows=flip_bit(observed.rows))
                rank.mark("control", differences(job.case, job.expected, rank.rank, spoilt))
        rank.mark("low latency", low_latency.differences(rank.rank, buffer))
        return dict(buffer.stats())


def run(jobs: list[Job], low_latency: LowLatencyJob, configs: list[EpConfig]) -> list[str]:
    """Lets the ranks work; what is wrong, by line."""
    wrong: list[str] = []
    started = time.monotonic()
    with ProcessRanks(len(configs), work, (jobs, low_latency, configs), method="fork") as ranks:
        ranks.wait_mark("created", timeout_s=CREATION_TIMEOUT_S)
        print(f"{len(configs)} ranks ready after {time.monotonic() - started:.1f} s", flush=True)
        for i, job in enumerate(jobs):
            since = time.monotonic()
            by_rank = ranks.wait_mark(f"case {i}", timeout_s=CASE_TIMEOUT_S)
            found = [line for lines in by_rank for line in lines]
            verdict = "WRONG" if found else "ok"
            print(f"{verdict}  {time.monotonic() - since:5.1f} s  {brief(job.case)}", flush=True)
            wrong += [f"{job.case}\n  {line}" for line in found]
        found = [line for lines in ranks.wait_mark("low latency", timeout_s=CASE_TIMEOUT_S) for line in lines]
        print(f"{'WRONG' if found else 'ok'}  low latency", flush=True)
        wrong += [f"low latency: {line}" for line in found]
        for rank, noticed in enumerate(ranks.wait_mark("control", timeout_s=CASE_TIMEOUT_S)):
            if not noticed and len(jobs[0].expected.expert_rows[rank]) > 0:
                wrong.append(f"rank {rank}: a flipped bit was not noticed")
        stats = ranks.results(timeout_s=CREATION_TIMEOUT_S)
    shipped = sum(entry["rows.shipped"] for entry in stats)
    print(f"{shipped:.0f} rows crossed between domains", flush=True)
    return wrong if shipped > 0 else [*wrong, "no row crossed between domains"]


def brief(case: Case) -> str:
    first = case.inputs[0]
    form = f"top-{first.topk_idx.shape[1]}" if first.topk_idx is not None else "map"
    tokens = [len(entry.x) for entry in case.inputs]
    return f"seed {case.seed}: {case.dispatch_dtype}, {form}, {case.layout}, tokens {tokens}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", default="loop", choices=("loop", "ofi", "verbs"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--domain-size", type=int, default=2)
    parser.add_argument("--cases", type=int, default=24, help="how many seeds from --seed on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--nics", help="the NIC of each domain, with commas; by default the transport chooses"
    )
    return parser.parse_args(arguments)


def transport_of(told: argparse.Namespace, domain: int) -> dict[str, Any]:
    """Arguments of `EpConfig` that say how a domain's ranks reach the others."""
    if told.nics is None:
        return {"transport": told.transport}
    nics = told.nics.split(",")
    return {"transport": told.transport, "nics": (nics[domain % len(nics)],)}


def main() -> int:
    told = parse()
    torch.set_num_threads(1)
    domains = tuple(rank // told.domain_size for rank in range(told.ranks))
    if EXPERTS % told.ranks:
        raise SystemExit(f"--ranks {told.ranks}: allowed are divisors of {EXPERTS}")
    spec = EngineSpec(domains=domains, num_experts=EXPERTS, hidden=HIDDEN, settings=ROOM)
    configs = [EpConfig(**{**spec.config(), **SETTINGS, **transport_of(told, domain)}) for domain in domains]
    started = time.monotonic()
    jobs = [make_job(seed, spec) for seed in range(told.seed, told.seed + told.cases)]
    print(f"the oracle has worked out {len(jobs)} cases in {time.monotonic() - started:.1f} s", flush=True)
    try:
        wrong = run(jobs, LowLatencyJob.make(spec), configs)
    except AssertionError as error:  # A rank has failed or is late.
        wrong = [str(error)]
    print("\n".join(wrong), file=sys.stderr, flush=True)
    if (told.ranks, told.domain_size) == (4, 2):
        settings = [{"mask_timeout_s": 8.0, **transport_of(told, domain)} for domain in (0, 1)]
        lose("host", "2x2", 3, [2, 3], "kill", settings=settings, method="fork")
        print("ok  low latency without a killed rank and its domain", flush=True)
    where = f"{told.ranks} ranks, {len(set(domains))} domains, {told.transport}"
    print(f"{where}: {'FAILED' if wrong else f'{len(jobs)} cases bit for bit right'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
