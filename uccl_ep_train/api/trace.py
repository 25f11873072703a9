"""Traces in Chrome's event format, for Perfetto (ui.perfetto.dev) or chrome://tracing: one file per rank.

    with buffer.trace("run/step7") as trace:       # run/step7.rank<k>.json
        got = buffer.dispatch(x, topk_idx, topk_weights)
        out = buffer.combine(got.rows, got.handle)

    python -m uccl_ep_train.trace run/step7.json run/step7.rank*.json

A process per rank; its lanes:

    steps               host backend: operations, and in them the steps at work and the waits, with the
                        awaited rank
    slots               host backend: low-latency operations, from when their result is wanted
    gpu, gpu <step>     CUDA: kernels; the time of the first block in each step; with several domains the
                        arrivals and departures that one block sees
    queue               a chunk from the push of its command until the proxy took the command
    proxy               a chunk from there until it was posted: windows, credits, refusals
    credits             waits for a credit; credits sent and received
    wire to rank j      a chunk from its post until the transport flushed it
    arrivals from rank j

Times are microseconds of CLOCK_MONOTONIC. Where slices of a lane overlap it gets a second row, "queue (2)".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from uccl_ep_train.common.command_line import output_file, run
from uccl_ep_train.common.shown import shown
from uccl_ep_train.common.uncopied import Uncopied
from uccl_ep_train.errors import DtypeError, InputError
from uccl_ep_train.settings.checks import integer

__all__ = ["Trace", "merge_traces"]

DEFAULT_EVENTS = 1 << 17
MAX_EVENTS = 1 << 24
_OPERATIONS = {1: "dispatch", 2: "combine", 3: "low-latency dispatch", 4: "low-latency combine"}
_MOST_IN_STEPS = 2  # others have none


class _Event(NamedTuple):
    """An event of the native core; times in nanoseconds."""

    kind: str
    ring: str
    step: str
    peer: int
    channel: int
    serial: int
    num_bytes: int
    begin: int
    end: int


class Trace(Uncopied):
    """What `Buffer.trace` returns; a context manager.

    path         of this rank's file
    lost_events  number of events beyond `max_events`, known at the end; a warning reports it, too
    """

    def __init__(self, engine: Any, rank: int, path: str | os.PathLike[str], max_events: int) -> None:
        if not isinstance(path, str | os.PathLike):
            raise DtypeError(f"path is {type(path).__name__}; allowed is a str or a path")
        try:
            most = integer(1, MAX_EVENTS).check(max_events)
        except (TypeError, ValueError):
            raise InputError(f"max_events = {shown(max_events)}: allowed 1 to {MAX_EVENTS}") from None
        self.path = Path(f"{os.fspath(path)}.rank{rank}.json")
        self.lost_events = 0
        self._engine = engine
        self._rank = rank
        self._max_events = most

    def __enter__(self) -> Trace:
        try:
            self._file = self.path.open("w")
        except (OSError, ValueError) as error:
            raise InputError(f"path: {self.path} cannot be written ({error})") from error
        try:
            self._engine.start_trace(self._max_events)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            native, self.lost_events = self._engine.stop_trace()
            events = sorted((_Event(*event) for event in native), key=lambda event: event.begin)
            self._file.write(json.dumps(_document(self._rank, events, self.lost_events)))
        if self.lost_events:
            warnings.warn(
                f"{self.path} lacks {self.lost_events} events: max_events = {self._max_events} were too few",
                stacklevel=2,
            )


def merge_traces(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Joins the files of several ranks into `out`.

    Ranks of one host share CLOCK_MONOTONIC, so their times are comparable. Clocks of different hosts are not
    aligned: compare times within one host only. `otherData` of the result names the host of each rank.

    Raises `InputError` if a file cannot be read or written, is no trace of this package, or repeats a rank,
    and where `out` is itself the trace of a rank, which would be lost.
    """
    merged: list[dict[str, Any]] = []
    hosts: dict[str, str] = {}
    lost = 0
    for path in paths:
        events, about = read_document(path)
        rank, host, lost_here = (about.get(name) for name in ("rank", "host", "lost_events"))
        if not (isinstance(rank, int) and isinstance(host, str) and isinstance(lost_here, int)):
            raise InputError(f"paths: {path} is no trace of one rank: otherData is {about!s:.80}")
        rank, lost = str(rank), lost + lost_here
        if rank in hosts:
            raise InputError(f"paths: {path} is a second trace of rank {rank}")
        hosts[rank] = host
        merged += events
    if _is_of_a_rank(out):
        raise InputError(f"out: {out} is the trace of a rank; allowed is another file, which comes first")
    about = {"clock": "CLOCK_MONOTONIC", "hosts": hosts, "lost_events": lost}
    try:
        document = {"traceEvents": merged, "displayTimeUnit": "ns", "otherData": about}
        Path(out).write_text(json.dumps(document))
    except OSError as error:
        raise InputError(f"out: {out} cannot be written ({error})") from error


def _is_of_a_rank(path: str | os.PathLike[str]) -> bool:
    try:
        return "rank" in read_document(path)[1]
    except InputError:
        return False


def read_document(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a file, and what it says of itself. Raises `InputError` if it is no trace."""
    try:
        document = json.loads(Path(path).read_text())
        events, about = document["traceEvents"], document.get("otherData", {})
        if not isinstance(events, list) or not isinstance(about, dict):
            raise TypeError("traceEvents is no list, or otherData no object")
        for event in events:
            if any(name not in event for name in ("name", "ph", "pid", "tid", "args")):
                raise KeyError(f"an event is {event!s:.80}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"paths: {path} is no trace that can be read ({error!r})") from error
    return events, about


def _document(rank: int, events: Sequence[_Event], lost: int) -> dict[str, Any]:
    lanes = _Lanes()
    end = max((event.end for event in events), default=0)
    _add_operations(lanes, events, end)
    _add_chunks(lanes, events, end)
    _add_instants(lanes, events)
    if lost:
        lanes.instant("steps", f"{lost} events lost", end, {"lost_events": lost})
    about = {"rank": rank, "host": platform.node(), "clock": "CLOCK_MONOTONIC", "lost_events": lost}
    return {"traceEvents": lanes.events(rank), "displayTimeUnit": "ns", "otherData": about}


def _chunk_args(event: _Event) -> dict[str, Any]:
    args: dict[str, Any] = {"channel": event.ring, "serial": event.serial, "bytes": event.num_bytes}
    if event.ring == "header":  # one for each operation
        args["epoch"] = event.serial + 1
    return args


def _add_operations(lanes: _Lanes, events: Sequence[_Event], end: int) -> None:
    begun: _Event | None = None
    for e in events:
        epoch = {"epoch": e.serial}
        if e.kind == "operation" and e.channel > _MOST_IN_STEPS:
            lanes.slice("slots", _OPERATIONS[e.channel], e.begin, e.end, epoch)
        elif e.kind == "operation":
            lanes.slice("steps", _OPERATIONS[e.channel], e.begin, e.end, epoch, nests=True)
        elif e.kind == "step":
            lanes.slice("steps", e.step, e.begin, e.end, epoch, nests=True)
        elif e.kind == "wait":
            whom = f" for rank {e.peer}" if e.peer >= 0 else ""
            args = epoch | {"step": e.step, "peer": e.peer}
            lanes.slice("steps", f"wait in {e.step}{whom}", e.begin, e.end, args, nests=True)
        elif e.kind == "kernel_step":
            lanes.slice(f"gpu {e.step}", e.step, e.begin, e.end, epoch)
        elif e.kind == "kernel_begin":
            # A kernel whose guessed memory was too small records no end.
            if begun is not None:
                lanes.slice("gpu", _OPERATIONS[begun.channel], begun.begin, e.begin, {"epoch": begun.serial})
            begun = e
        elif e.kind == "kernel_end" and begun is not None:
            lanes.slice("gpu", _OPERATIONS[e.channel], begun.begin, e.end, epoch)
            begun = None
    if begun is not None:
        args = {"epoch": begun.serial, "unfinished": True}
        lanes.slice("gpu", _OPERATIONS[begun.channel], begun.begin, end, args)


def _add_chunks(lanes: _Lanes, events: Sequence[_Event], end: int) -> None:
    """From push to flush. Stages before the start of the trace are unknown and get no slice."""
    chunks: dict[tuple[int, int], dict[str, _Event]] = {}
    for event in events:
        if event.kind in ("pushed", "taken", "posted", "flushed"):
            chunks.setdefault((event.channel, event.serial), {})[event.kind] = event
    for did in chunks.values():
        for lane, first, last in (
            ("queue", "pushed", "taken"),
            ("proxy", "taken", "posted"),
            ("wire", "posted", "flushed"),
        ):
            begun, ended = did.get(first), did.get(last)
            if begun is None:
                continue
            about = did.get("taken") or ended or begun
            args = _chunk_args(about)
            if ended is None:
                args["unfinished"] = True
            name = f"{about.ring} {about.serial}"
            if lane == "wire":
                lane = f"wire to rank {about.peer}"
            elif about.peer >= 0:
                name += f" to rank {about.peer}"
            until = ended.begin if ended is not None else end
            # A kernel's clock is accurate to microseconds: a push may appear later than its take.
            since = min(begun.begin, until) if begun.kind == "pushed" and begun.peer >= 0 else begun.begin
            lanes.slice(lane, name, since, until, args)


def _add_instants(lanes: _Lanes, events: Sequence[_Event]) -> None:
    for e in events:
        name = f"{e.ring} {e.serial}"
        if e.kind == "arrived":
            lanes.instant(f"arrivals from rank {e.peer}", name, e.begin, _chunk_args(e))
        elif e.kind in ("credit_sent", "credit_received"):
            way = "to" if e.kind == "credit_sent" else "from"
            args = {"channel": e.ring, "consumed": e.serial}
            lanes.instant("credits", f"{e.ring} credit {way} rank {e.peer}", e.begin, args)
        elif e.kind == "credit_wait":
            lanes.slice("credits", f"{name} waits for rank {e.peer}", e.begin, e.end, _chunk_args(e))
        elif e.kind == "pushed" and e.peer >= 0:  # by a kernel, which knows the peer
            lanes.instant("gpu", f"push {name} to rank {e.peer}", e.begin, _chunk_args(e))
        elif e.kind in ("seen_arrived", "seen_flushed"):
            arrived = e.kind == "seen_arrived"
            seen = f"from rank {e.peer} at rank {e.channel}" if arrived else f"to rank {e.peer} gone"
            lanes.instant("gpu sees", f"{e.ring} {seen}", e.begin, {"channel": e.ring, "chunks": e.serial})


class _Lanes:
    """Collects slices and instants by the name of their lane. Those of a row never overlap, but may nest."""

    def __init__(self) -> None:
        self._slices: dict[str, list[tuple[int, int, bool, dict[str, Any]]]] = {}
        self._instants: dict[str, list[dict[str, Any]]] = {}

    def slice(
        self, lane: str, name: str, begin: int, end: int, args: dict[str, Any], *, nests: bool = False
    ) -> None:
        event = {"name": name, "ph": "X", "ts": begin / 1000, "dur": (end - begin) / 1000, "args": args}
        self._slices.setdefault(lane, []).append((begin, end, nests, event))

    def instant(self, lane: str, name: str, at: int, args: dict[str, Any]) -> None:
        event = {"name": name, "ph": "i", "s": "t", "ts": at / 1000, "args": args}
        self._instants.setdefault(lane, []).append(event)

    def events(self, rank: int) -> list[dict[str, Any]]:
        rows: list[tuple[str, list[dict[str, Any]]]] = []
        for lane in sorted(self._slices.keys() | self._instants.keys(), key=_place):
            split = self._rows(lane) or [[]]
            split[0] += self._instants.get(lane, [])
            rows += [(lane if i == 0 else f"{lane} ({i + 1})", row) for i, row in enumerate(split)]
        meta = [_metadata(rank, 0, "process_name", name=f"rank {rank}")]
        meta.append(_metadata(rank, 0, "process_sort_index", sort_index=rank))
        events = []
        for tid, (lane, row) in enumerate(rows, start=1):
            meta.append(_metadata(rank, tid, "thread_name", name=lane))
            meta.append(_metadata(rank, tid, "thread_sort_index", sort_index=tid))
            events += [{**event, "pid": rank, "tid": tid} for event in row]
        return meta + sorted(events, key=lambda event: event["ts"])

    def _rows(self, lane: str) -> list[list[dict[str, Any]]]:
        """Each slice goes to the first row where it overlaps none, or lies in one that lets it nest."""
        rows: list[tuple[list[dict[str, Any]], list[int]]] = []  # with the ends of what is open
        for begin, end, nests, event in sorted(self._slices.get(lane, []), key=lambda s: (s[0], -s[1])):
            for _, ends in rows:
                while ends and ends[-1] <= begin:
                    ends.pop()
            fits = (row for row in rows if not row[1] or (nests and end <= row[1][-1]))
            if (row := next(fits, None)) is None:
                rows.append(row := ([], []))
            row[0].append(event)
            row[1].append(end)
        return [row for row, _ in rows]


def _metadata(rank: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": rank, "tid": tid, "args": args}


_ORDER = ("steps", "slots", "gpu", "queue", "proxy", "credits", "wire", "arrivals")


def _place(lane: str) -> tuple[int, str, int]:
    """The order of lanes: along a chunk's way, then by rank."""
    kind, *rest = lane.split()
    number = int(rest[-1]) if rest and rest[-1].isdigit() else -1
    return _ORDER.index(kind), lane if number < 0 else "", number


def _main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m uccl_ep_train.trace", description="Joins the traces of several ranks."
    )
    parser.add_argument("out", metavar="OUT.json", type=output_file())
    parser.add_argument(
        "parts", metavar="PART.json", nargs="+", help="what Buffer.trace wrote, a file per rank"
    )
    given = parser.parse_args(arguments)
    try:
        merge_traces(given.parts, given.out)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(_main))
