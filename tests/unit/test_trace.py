"""What a trace shows of a dispatch and a combine between domains, and what files and numbers say of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.api.trace import merge_traces
from uccl_ep_train.core.stats import sum_stats
from uccl_ep_train.errors import ClosedError, ConfigError, DtypeError, EpError, InputError

SETTINGS: dict[str, Any] = {
    "backend": "host", "num_experts": 8, "hidden": 256, "max_dtype": "fp32",
    "domain_size": 2, "chunk_bytes": 8192, "window_chunks": 2,
}  # fmt: skip
RANKS = 4
QUIET = ("credit.sent", "proxy.arrivals", "proxy.commands")
LANES = ("queue", "proxy", "wire")
Action = Callable[[int, Buffer], Any]


def exchange(rank: int, buffer: Buffer) -> None:
    generator = torch.Generator("cpu").manual_seed(rank)
    x = torch.randn(300, 256, generator=generator, device="cpu")
    topk_idx = torch.rand(300, 8, generator=generator, device="cpu").topk(2, dim=1).indices
    result = buffer.dispatch(x, topk_idx, dispatch_dtype="bf16")
    buffer.combine(result.rows, result.handle)


@dataclass
class Traced:
    """parts: by rank, what its file says; stats: by rank, what was counted meanwhile."""

    parts: list[dict[str, Any]]
    stats: list[dict[str, float]]
    paths: list[Path]


def settle(buffer: Buffer, barrier: threading.Barrier) -> None:
    """All ranks are through, and nothing moves any more between them."""
    barrier.wait(30)
    before: list[float] = []
    while before != (now := [v for name, v in buffer.stats().items() if name in QUIET]):
        before = now
        time.sleep(0.05)
    barrier.wait(30)


def traced(folder: Path, act: Action = exchange, warm_up: int = 1, **settings: Any) -> Traced:
    barrier = threading.Barrier(RANKS)

    def run(rank: int, buffer: Buffer) -> dict[str, float]:
        for _ in range(warm_up):
            exchange(rank, buffer)
        settle(buffer, barrier)
        before = buffer.stats()
        barrier.wait(30)
        with buffer.trace(folder / "run") as trace:
            barrier.wait(30)
            act(rank, buffer)
            settle(buffer, barrier)
            assert trace.path == folder / f"run.rank{rank}.json"
        assert trace.lost_events == 0
        return {name: value - before[name] for name, value in buffer.stats().items()}

    with RankGroup(RANKS, SETTINGS | settings) as group:
        stats = group.run(run)
    paths = [folder / f"run.rank{rank}.json" for rank in range(RANKS)]
    return Traced([json.loads(path.read_text()) for path in paths], stats, paths)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory.mktemp("trace"))


def lanes(part: dict[str, Any]) -> dict[int, str]:
    """By tid, without the number of a row."""
    events = part["traceEvents"]
    named = [event for event in events if event["name"] == "thread_name"]
    return {event["tid"]: re.sub(r" \(\d+\)$", "", event["args"]["name"]) for event in named}


def events_in(part: dict[str, Any], lane: str, phase: str = "X") -> list[dict[str, Any]]:
    names = lanes(part)
    return [e for e in part["traceEvents"] if e["ph"] == phase and re.fullmatch(lane, names[e["tid"]])]


def chunk_key(event: dict[str, Any], peer: int) -> tuple[str, int, int]:
    return event["args"]["channel"], peer, event["args"]["serial"]


def chunks(part: dict[str, Any], lane: str) -> dict[tuple[str, int, int], dict[str, Any]]:
    """By channel, peer and serial; none is there twice."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    phase = "i" if lane == "arrivals" else "X"
    for name in set(lanes(part).values()):
        if name.split()[0] != lane:
            continue
        for event in events_in(part, re.escape(name), phase):
            key = chunk_key(event, int((name if "rank" in name else event["name"]).split()[-1]))
            assert key not in found, f"{lane}: {key} twice"
            found[key] = event
    return found


class TestChunks:
    def test_every_chunk_is_once_in_the_queue_in_the_proxy_and_on_the_wire(self, one: Traced) -> None:
        for part, stats in zip(one.parts, one.stats, strict=True):
            counted = Counter[str]()
            for name, value in stats.items():
                if re.fullmatch(r"ship\..*\.chunks", name):
                    counted[name.split(".")[1]] += int(value)
            assert set(counted) == {"header", "meta", "rows", "return"} and min(counted.values()) > 0
            keys = [chunks(part, lane).keys() for lane in LANES]
            assert keys[0] == keys[1] == keys[2]
            assert Counter(ring for ring, _, _ in keys[0]) == counted

    def test_each_lies_after_the_other_and_none_is_unfinished(self, one: Traced) -> None:
        for part in one.parts:
            queue, proxy, wire = (chunks(part, lane) for lane in LANES)
            for key, event in queue.items():
                assert event["dur"] >= 0 and proxy[key]["dur"] >= 0 and wire[key]["dur"] > 0
                assert event["ts"] + event["dur"] == pytest.approx(proxy[key]["ts"], abs=1e-3)
                assert proxy[key]["ts"] + proxy[key]["dur"] == pytest.approx(wire[key]["ts"], abs=1e-3)
                assert not any("unfinished" in lane[key]["args"] for lane in (queue, proxy, wire))

    def test_what_was_posted_arrives_once_at_the_peer_and_later(self, one: Traced) -> None:
        num_chunks = 0
        for rank, part in enumerate(one.parts):
            for peer, other in enumerate(one.parts):
                sent = {k: e for k, e in chunks(part, "wire").items() if k[1] == peer}
                arrived = {k: e for k, e in chunks(other, "arrivals").items() if k[1] == rank}
                assert {(ring, serial) for ring, _, serial in sent} == {(r, s) for r, _, s in arrived}
                for (ring, _, serial), event in sent.items():
                    there = arrived[ring, rank, serial]
                    assert there["ts"] >= event["ts"]
                    assert there["args"]["bytes"] == event["args"]["bytes"]
                num_chunks += len(sent)
        assert num_chunks > 100

    def test_bytes_add_up_to_what_the_counters_say(self, one: Traced) -> None:
        for part, stats in zip(one.parts, one.stats, strict=True):
            for lane in LANES:
                traced_bytes = Counter[str]()
                for (ring, _, _), event in chunks(part, lane).items():
                    traced_bytes[ring] += event["args"]["bytes"]
                counted = {
                    name.split(".")[1]: v for name, v in stats.items() if re.match(r"ship.*\.bytes", name)
                }
                assert traced_bytes == counted
            arrived = chunks(part, "arrivals").values()
            assert sum(event["args"]["bytes"] for event in arrived) == stats["proxy.arrived_bytes"]

    def test_credits_and_waits_for_them_are_those_that_were_counted(self, one: Traced) -> None:
        for part, stats in zip(one.parts, one.stats, strict=True):
            sent = [e for e in events_in(part, "credits", "i") if "credit to" in e["name"]]
            assert len(sent) == stats["credit.sent"] > 0
            waits = events_in(part, "credits")
            assert len(waits) == stats["credit.waits"]
            seconds = sum(event["dur"] for event in waits) * 1e-6
            assert seconds == pytest.approx(stats["credit.wait_seconds"], abs=1e-3)
        assert any(stats["credit.waits"] for stats in one.stats)

    def test_headers_name_the_operation(self, one: Traced) -> None:
        for part in one.parts:
            epochs = {e["args"]["epoch"] for k, e in chunks(part, "wire").items() if k[0] == "header"}
            assert epochs == {e["args"]["epoch"] for e in events_in(part, "steps")} == {3, 4}

    def test_a_slow_link_shows_as_long_slices_on_the_wire(self, one: Traced, tmp_path: Path) -> None:
        def longest(found: Traced) -> float:
            return max(e["dur"] for part in found.parts for e in chunks(part, "wire").values())

        slow = traced(tmp_path, loop_latency_us=30_000.0)
        assert longest(slow) >= 30_000
        assert longest(one) < 30_000


class TestSteps:
    def test_operations_hold_their_steps(self, one: Traced) -> None:
        for part in one.parts:
            slices = events_in(part, "steps")
            operations = [e for e in slices if e["name"] in ("dispatch", "combine")]
            assert [e["name"] for e in operations] == ["dispatch", "combine"]
            for event in slices:
                holder = operations[event["args"]["epoch"] - 3]
                assert event["ts"] >= holder["ts"] - 1e-3
                assert event["ts"] + event["dur"] <= holder["ts"] + holder["dur"] + 1e-3
            steps = {(e["args"]["epoch"], e["name"]) for e in slices if not e["name"].startswith("wait")}
            assert {(3, "stage"), (3, "place"), (4, "fold"), (4, "merge")} <= steps

    def test_time_in_steps_is_the_time_that_is_counted(self, one: Traced) -> None:
        for part, stats in zip(one.parts, one.stats, strict=True):
            for step in ("stage", "place", "fold", "merge"):
                found = [e["dur"] for e in events_in(part, "steps") if e["name"] == step]
                counted = stats[f"busy_seconds.{step}"]
                # Another look at the clock per slice, between which the thread may lose the core.
                assert sum(found) * 1e-6 == pytest.approx(counted, rel=0.2, abs=0.02)

    def test_whom_the_others_wait_for_is_in_the_trace_and_in_the_numbers(self, tmp_path: Path) -> None:
        late = 2

        def act(rank: int, buffer: Buffer) -> float:
            if rank == late:
                time.sleep(0.3)
            exchange(rank, buffer)
            return buffer.stats()["straggler.rank"]

        found = traced(tmp_path, act, warm_up=0)
        for rank, (part, stats) in enumerate(zip(found.parts, found.stats, strict=True)):
            waits = [e for e in events_in(part, "steps") if e["name"] == f"wait in exchange for rank {late}"]
            waited = sum(event["dur"] for event in waits) * 1e-6
            assert rank == late or (waited > 0.2 and stats["straggler.wait_seconds"] > 0.2)

    def test_the_straggler_is_named(self) -> None:
        late = 1

        def act(rank: int, buffer: Buffer) -> dict[str, float]:
            assert buffer.stats()["straggler.rank"] == -1
            time.sleep(0.3 if rank == late else 0)
            exchange(rank, buffer)
            return buffer.stats()

        with RankGroup(RANKS, SETTINGS) as group:
            stats = group.run(act)
        assert [s["straggler.rank"] == late for s in stats] == [rank != late for rank in range(RANKS)]
        assert sum_stats(stats)["straggler.rank"] == late


class TestLatency:
    def test_percentiles_are_those_of_the_chunks_in_the_trace(self, tmp_path: Path) -> None:
        """All chunks since creation are in it, and fewer than are kept."""
        stats: dict[int, dict[str, float]] = {}

        def act(rank: int, buffer: Buffer) -> None:
            with buffer.trace(tmp_path / "all"):
                exchange(rank, buffer)
            stats[rank] = buffer.stats()

        with RankGroup(RANKS, SETTINGS | {"loop_latency_us": 200.0}) as group:
            group.run(act)
        for rank in range(RANKS):
            part = json.loads((tmp_path / f"all.rank{rank}.json").read_text())
            proxy, wire = chunks(part, "proxy"), chunks(part, "wire")
            took = sorted(proxy[key]["dur"] + wire[key]["dur"] for key in wire)
            assert 50 < len(took) < 1024
            for percent in (50, 99):
                nearest = took[-(-len(took) * percent // 100) - 1]
                assert stats[rank][f"proxy.command_usec.p{percent}"] == pytest.approx(nearest, abs=0.01)
            assert stats[rank]["proxy.command_usec.p50"] >= 200

    def test_of_several_ranks_the_largest_counts(self) -> None:
        stats = [{"proxy.command_usec.p99": 3.0, "straggler.rank": 2.0, "straggler.wait_seconds": 9.0}]
        stats += [{"proxy.command_usec.p99": 4.0, "straggler.rank": 0.0, "straggler.wait_seconds": 1.0}]
        assert sum_stats(stats) == stats[0] | {"proxy.command_usec.p99": 4.0}

    def test_they_are_zero_before_the_first_chunk(self) -> None:
        with RankGroup(2, SETTINGS | {"num_experts": 2}) as group:
            for rank in range(2):
                stats = group.buffer(rank).stats()
                assert stats["proxy.command_usec.p50"] == stats["proxy.command_usec.p99"] == 0


class TestFiles:
    def test_perfetto_loads_it(self, one: Traced) -> None:
        """Chrome's format: what every event has to have; slices of one thread nest or follow each other."""
        for rank, part in enumerate(one.parts):
            open_until: dict[int, list[float]] = {}
            assert set(part) >= {"traceEvents", "displayTimeUnit"}
            for event in part["traceEvents"]:
                assert {"name", "ph", "ts", "pid", "tid"} <= set(event)
                assert event["pid"] == rank and event["ph"] in ("X", "i", "M") and event["ts"] >= 0
                if event["ph"] != "X":
                    continue
                ends = open_until.setdefault(event["tid"], [])
                while ends and ends[-1] <= event["ts"] + 1e-3:
                    ends.pop()
                fits = not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3
                assert event["dur"] >= 0 and fits, (lanes(part)[event["tid"]], event, ends)
                ends.append(event["ts"] + event["dur"])
            assert {e["tid"] for e in part["traceEvents"]} == {0, *lanes(part)}
            process = [e["args"]["name"] for e in part["traceEvents"] if e["name"] == "process_name"]
            assert process == [f"rank {rank}"]

    def test_parts_are_merged_rank_by_rank(self, one: Traced, tmp_path: Path) -> None:
        out = tmp_path / "all.json"
        command = [sys.executable, "-m", "uccl_ep_train.trace", str(out), *map(str, one.paths)]
        subprocess.run(command, check=True, timeout=60)
        merged = json.loads(out.read_text())
        assert merged["traceEvents"] == [event for part in one.parts for event in part["traceEvents"]]
        assert set(merged["otherData"]["hosts"]) == {"0", "1", "2", "3"}
        merge_traces(one.paths[:2], out)
        assert {event["pid"] for event in json.loads(out.read_text())["traceEvents"]} == {0, 1}

    def test_what_is_no_trace_is_not_merged(self, one: Traced, tmp_path: Path) -> None:
        (tmp_path / "other.json").write_text("[1, 2]")
        for paths in ([tmp_path / "other.json"], [tmp_path / "gone.json"], [one.paths[0], one.paths[0]]):
            with pytest.raises(InputError, match="paths"):
                merge_traces(paths, tmp_path / "out.json")
        with pytest.raises(InputError, match="out"):
            merge_traces(one.paths, tmp_path / "gone" / "out.json")
        command = [
            sys.executable,
            "-m",
            "uccl_ep_train.trace",
            str(tmp_path / "out"),
            str(tmp_path / "gone.json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "gone.json" in done.stderr
        assert not (tmp_path / "out.json").exists()

    def test_nothing_is_recorded_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        def act(rank: int, buffer: Buffer) -> None:
            wrong: list[tuple[Any, dict[str, Any], type[EpError]]] = [
                (tmp_path / "gone" / "run", {}, InputError),
                ("run\0", {}, InputError),
                (7, {}, DtypeError),
                (tmp_path / "run", {"max_events": 0}, InputError),
                (tmp_path / "run", {"max_events": 1 << 25}, InputError),
                (tmp_path / "run", {"max_events": True}, InputError),
            ]
            for path, arguments, error in wrong:
                with pytest.raises(error), buffer.trace(path, **arguments):
                    raise ConfigError("this must not run")
            with buffer.trace(tmp_path / "good"):
                with pytest.raises(InputError, match="already"), buffer.trace(tmp_path / "second"):
                    raise ConfigError("this must not run")
                exchange(rank, buffer)
            assert chunks(json.loads((tmp_path / f"good.rank{rank}.json").read_text()), "wire")
            buffer.close()
            with pytest.raises(ClosedError), buffer.trace(tmp_path / "late"):
                raise ConfigError("this must not run")

        with RankGroup(RANKS, SETTINGS) as group:
            group.run(act)

    def test_a_trace_ends_with_a_buffer_that_is_closed_in_it(self, tmp_path: Path) -> None:
        def act(rank: int, buffer: Buffer) -> None:
            with buffer.trace(tmp_path / "run"):
                exchange(rank, buffer)
                buffer.close()
            assert chunks(json.loads((tmp_path / f"run.rank{rank}.json").read_text()), "wire")

        with RankGroup(RANKS, SETTINGS) as group:
            group.run(act)


class TestRecording:
    def test_nothing_of_before_or_after_is_in_a_trace(self, tmp_path: Path) -> None:
        found = traced(tmp_path, lambda rank, buffer: None)
        for part in found.parts:
            assert [e for e in part["traceEvents"] if e["ph"] != "M"] == []
        assert traced(tmp_path, warm_up=0).parts[0]["traceEvents"][-1]["ph"] != "M"

    def test_a_full_buffer_keeps_the_first_events_and_says_how_many_it_lost(self, tmp_path: Path) -> None:
        def act(rank: int, buffer: Buffer) -> int:
            with buffer.trace(tmp_path / "small", max_events=9) as trace:
                exchange(rank, buffer)
            with buffer.trace(tmp_path / "next", max_events=9):
                pass
            return trace.lost_events

        with pytest.warns(UserWarning, match="lacks") as warned, RankGroup(RANKS, SETTINGS) as group:
            losses = group.run(act)
        assert len(warned) == RANKS
        for rank, lost in enumerate(losses):
            part = json.loads((tmp_path / f"small.rank{rank}.json").read_text())
            assert part["otherData"]["lost_events"] == lost > 50
            told = [e["args"]["lost_events"] for e in part["traceEvents"] if "lost" in e["name"]]
            assert told == [lost]
            assert chunks(part, "proxy")  # what began is there
            emptied = json.loads((tmp_path / f"next.rank{rank}.json").read_text())
            assert emptied["otherData"]["lost_events"] == 0

    def test_an_exception_ends_the_trace_and_leaves_its_file(self, tmp_path: Path) -> None:
        def act(rank: int, buffer: Buffer) -> None:
            with pytest.raises(ZeroDivisionError), buffer.trace(tmp_path / "run"):
                exchange(rank, buffer)
                raise ZeroDivisionError
            with buffer.trace(tmp_path / "again"):
                pass
            assert chunks(json.loads((tmp_path / f"run.rank{rank}.json").read_text()), "wire")

        with RankGroup(RANKS, SETTINGS) as group:
            group.run(act)
