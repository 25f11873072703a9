"""Rates of the parts between domains, each by itself, from files of `Buffer.trace`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from uccl_ep_train.api.trace import read_document
from uccl_ep_train.errors import InputError

_LEAST = 4  # observations that a rate is made from


@dataclass(frozen=True)
class TraceRates:
    """None: the trace does not give it.

    queue_us   median of a chunk's command, from its push until the proxy takes it
    post_us    median from there until it is posted, with waits for credits
    nic_gbps   bytes over the time between two flushes; the later chunk was posted before the first flush
    wire_us    median from post to flush of chunks that found the NIC idle, less their bytes at nic_gbps
    relay_us   median from an arrival at the proxy until a kernel saw it
    """

    queue_us: float | None
    post_us: float | None
    nic_gbps: float | None
    wire_us: float | None
    relay_us: float | None


def read(paths: Iterable[str | Path]) -> TraceRates:
    """Of one file for each rank, or a merged one. Raises InputError where one is no trace, or of a rank that
    an earlier one is of."""
    events: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    for path in paths:
        own = read_document(path)[0]
        ranks = {str(event["pid"]) for event in own}
        if again := seen & ranks:
            raise InputError(
                f"paths: {path} is a second trace of rank {min(again)}; allowed is a file for each rank, or "
                "a merged one alone"
            )
        seen |= ranks
        events += own
    try:
        return _rates(events)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"the events are of no trace of Buffer.trace ({error!r})") from None


def _rates(events: Iterable[Mapping[str, Any]]) -> TraceRates:
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_lane: dict[str, list[Mapping[str, Any]]] = {}
    wires: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["ph"] not in ("X", "i") or event["args"].get("unfinished"):
            continue
        kind = lanes[event["pid"], event["tid"]].split(" (")[0]
        if kind.startswith("wire to"):
            wires.setdefault(event["pid"], []).append(event)
        by_lane.setdefault(kind, []).append(event)
    nic, wire = _wire(wires.values())
    return TraceRates(
        _median([e["dur"] for e in by_lane.get("queue", [])]),
        _median([e["dur"] for e in by_lane.get("proxy", [])]),
        nic,
        wire,
        _median(_seen(by_lane)),
    )


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if len(values) >= _LEAST else None


def _wire(ranks: Iterable[list[Mapping[str, Any]]]) -> tuple[float | None, float | None]:
    """(GB/s of a rank, us of a message without bytes)."""
    gaps, idle = [], []
    for slices in ranks:
        ordered = sorted(slices, key=lambda e: e["ts"] + e["dur"])
        for before, now in zip([None, *ordered], ordered, strict=False):
            size = now["args"]["bytes"]
            end = -np.inf if before is None else before["ts"] + before["dur"]
            if now["ts"] >= end:
                idle.append((size, now["dur"]))
            elif size:
                gaps.append((size, now["ts"] + now["dur"] - end))
    if len(gaps) < _LEAST:
        return None, None
    rate = sum(size for size, _ in gaps) / max(1e-9, sum(gap for _, gap in gaps)) / 1e3
    return rate, _median([dur - size / rate / 1e3 for size, dur in idle])


def _seen(lanes: Mapping[str, list[Mapping[str, Any]]]) -> list[float]:
    """From each arrival until this rank's kernel saw as many chunks of its channel. Hosts have no kernel."""
    seen: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for event in lanes.get("gpu sees", []):
        if event["name"].endswith(f"at rank {event['pid']}"):
            key = event["pid"], event["name"].split(" at rank")[0]
            seen.setdefault(key, []).append((event["ts"], event["args"]["chunks"]))
    found = []
    for lane, events in lanes.items():
        if not lane.startswith("arrivals from"):
            continue
        for event in events:
            key = event["pid"], f"{event['args']['channel']} {lane.removeprefix('arrivals ')}"
            later = [ts for ts, chunks in seen.get(key, []) if chunks > event["args"]["serial"]]
            if later:
                found.append(min(later) - event["ts"])
    return found
