"""Traces of buffers on GPUs: kernels, what they push and see, on the clock of the proxies."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.domain_ranks import NEEDS_GPU, DomainRanks, Seat

pytestmark = NEEDS_GPU

CLOCK_USEC = 50.0
"""How far the GPU's clock may seem to be from the host's."""


def trace_one(seat: Seat, domains: tuple[int, ...], folder: str) -> dict[str, float]:
    config = {"num_experts": 2 * len(domains), "hidden": 512, "domains": domains}
    with seat.buffer(config) as buffer:
        x = torch.randn(600, 512, device="cuda", dtype=torch.bfloat16)
        topk_idx = torch.rand(600, 2 * len(domains), device="cuda").topk(2, dim=1).indices
        for traced in (False, True, False):
            before = buffer.stats()
            with buffer.trace(f"{folder}/{'run' if traced else 'other'}") as trace:
                result = buffer.dispatch(x, topk_idx)
                buffer.combine(result.rows, result.handle)
                torch.cuda.synchronize()
            assert trace.lost_events == 0
            if traced:
                counted = {
                    name: value - before[name] for name, value in buffer.stats().items() if name in before
                }
        return counted


def load(folder: Path, rank: int) -> tuple[list[dict[str, Any]], dict[int, str]]:
    events = json.loads((folder / f"run.rank{rank}.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [e for e in events if e["ph"] != "M"], {t: re.sub(r" \(\d+\)$", "", n) for t, n in names.items()}


@pytest.mark.parametrize("domains", [(0,), (0, 1)], ids=str)
def test_kernels_and_their_steps_lie_in_the_trace(
    domain_ranks: DomainRanks, tmp_path: Path, domains: tuple[int, ...]
) -> None:
    domain_ranks.run(len(domains), trace_one, domains, str(tmp_path))
    for rank in range(len(domains)):
        events, lanes = load(tmp_path, rank)
        kernels = [e for e in events if e["ph"] == "X" and lanes[e["tid"]] == "gpu"]
        assert {e["name"] for e in kernels} == {"dispatch", "combine"}
        assert not any("unfinished" in e["args"] for e in kernels)
        assert {e["args"]["epoch"] for e in kernels} == {3, 4}
        steps = {lanes[e["tid"]]: e for e in events if re.match("gpu (?!sees)", lanes[e["tid"]])}
        assert {"gpu exchange", "gpu stage", "gpu place", "gpu fold", "gpu merge"} <= set(steps)
        first, last = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
        for step in steps.values():
            assert first - 1 <= step["ts"] <= step["ts"] + step["dur"] <= last + 1


def test_what_kernels_push_is_what_the_proxy_ships(domain_ranks: DomainRanks, tmp_path: Path) -> None:
    counted = domain_ranks.run(2, trace_one, (0, 1), str(tmp_path))
    for rank in range(2):
        events, lanes = load(tmp_path, rank)
        pushes = [e for e in events if e["ph"] == "i" and lanes[e["tid"]] == "gpu"]
        wire = [e for e in events if lanes[e["tid"]].startswith("wire")]
        assert Counter(e["args"]["channel"] for e in pushes) == Counter(e["args"]["channel"] for e in wire)
        num_bytes = sum(v for name, v in counted[rank].items() if re.match(r"ship.*\.bytes", name))
        assert (
            sum(e["args"]["bytes"] for e in pushes) == sum(e["args"]["bytes"] for e in wire) == num_bytes > 0
        )
        taken = {
            (e["args"]["channel"], e["args"]["serial"]): e["ts"] for e in events if lanes[e["tid"]] == "proxy"
        }
        for event in pushes:
            late = taken[event["args"]["channel"], event["args"]["serial"]] - event["ts"]
            assert late > -CLOCK_USEC, event
        seen = {e["name"].split()[0] for e in events if lanes[e["tid"]] == "gpu sees"}
        assert seen == {"header", "rows", "return"}


def wait_for_a_late_rank(seat: Seat, domains: tuple[int, ...], late: int) -> dict[str, float]:
    with seat.buffer({"num_experts": 2 * len(domains), "hidden": 512, "domains": domains}) as buffer:
        x = torch.randn(100, 512, device="cuda", dtype=torch.bfloat16)
        topk_idx = torch.rand(100, 2 * len(domains), device="cuda").topk(2, dim=1).indices
        for again in range(2):
            if again and seat.rank == late:
                time.sleep(0.3)
            result = buffer.dispatch(x, topk_idx)
            buffer.combine(result.rows, result.handle)
            torch.cuda.synchronize()
        return buffer.stats()


@pytest.mark.parametrize("domains", [(0, 0), (0, 1)], ids=str)
def test_the_straggler_is_named(domain_ranks: DomainRanks, domains: tuple[int, ...]) -> None:
    others, late = domain_ranks.run(2, wait_for_a_late_rank, domains, 1)
    assert others["straggler.rank"] == 1
    assert 0.2 < others["straggler.wait_seconds"] < 2.0
    assert late["straggler.wait_seconds"] < others["straggler.wait_seconds"]
