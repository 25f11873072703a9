"""Rates from traces: those that a made-up trace was made with, and those of a real one over a slow link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_trace import traced
from uccl_ep_train.errors import InputError
from uccl_ep_train.planner.__main__ import main
from uccl_ep_train.planner.traces import read


def made_up(nic_gbps: float, wire_us: float, seen_us: float) -> dict[str, Any]:
    """Two bursts of eight chunks, and four lone ones, of rank 0 to rank 1."""
    lanes = ("queue", "proxy", "wire to rank 1", "arrivals from rank 1", "gpu sees")
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "ts": 0, "pid": 0, "tid": t, "args": {"name": n}}
        for t, n in enumerate(lanes)
    ]
    free, size = 0.0, 100_000
    posts = [1e3] * 8 + [2e3] * 8 + [3e3, 4e3, 5e3, 6e3]
    for serial, post in enumerate(posts):
        free = max(free, post) + size / nic_gbps / 1e3
        args = {"channel": "rows", "serial": serial, "bytes": size}
        events += [
            {"name": "q", "ph": "X", "ts": post - 3, "dur": 2.0, "pid": 0, "tid": 0, "args": args},
            {"name": "p", "ph": "X", "ts": post - 1, "dur": 1.0, "pid": 0, "tid": 1, "args": args},
            {
                "name": "w",
                "ph": "X",
                "ts": post,
                "dur": free + wire_us - post,
                "pid": 0,
                "tid": 2,
                "args": args,
            },
            {"name": "rows", "ph": "i", "ts": free, "pid": 0, "tid": 3, "args": args},
        ]
        about = {"channel": "rows", "chunks": serial + 1}
        sees = {"name": "rows from rank 1 at rank 0", "ph": "i", "ts": free + seen_us}
        events.append({**sees, "pid": 0, "tid": 4, "args": about})
    return {"traceEvents": events}


@pytest.mark.parametrize(("nic", "wire", "seen"), [(50.0, 5.0, 2.0), (10.0, 20.0, 7.0)])
def test_each_rate_is_found_by_itself(tmp_path: Path, nic: float, wire: float, seen: float) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(made_up(nic, wire, seen)))
    got = read([path])
    assert got.queue_us == pytest.approx(2) and got.post_us == pytest.approx(1)
    assert got.nic_gbps == pytest.approx(nic, rel=1e-3) and got.wire_us == pytest.approx(wire, abs=0.1)
    assert got.relay_us == pytest.approx(seen, abs=0.1)


def test_a_real_trace_gives_the_rate_of_its_link(tmp_path: Path) -> None:
    """1 MB/s: an 8 KiB chunk takes 8 ms, longer than the 4 ms for which a busy host lets others run."""
    rates = read(traced(tmp_path, loop_gbytes_per_s=0.001).paths)
    assert rates.nic_gbps == pytest.approx(0.001, rel=0.3)
    assert rates.queue_us is not None and rates.post_us is not None
    assert rates.relay_us is None, "no kernels here"


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    for name in ("x.json", "gone.json"):
        with pytest.raises(InputError, match="no trace"):
            read([tmp_path / name])


def test_a_rank_counts_once(tmp_path: Path) -> None:
    """Twice, it would have twice the rate: as of `run/*.json`, which has the merged file, too."""
    path, merged = tmp_path / "t.json", tmp_path / "merged.json"
    for name in (path, merged):
        name.write_text(json.dumps(made_up(50.0, 5.0, 2.0)))
    for more in (path, merged):
        with pytest.raises(InputError, match=f"{more} is a second trace of rank 0; allowed is a file for"):
            read([path, more])


def test_the_command_prints_what_a_trace_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(made_up(50.0, 5.0, 2.0)))
    assert main(["--trace", str(path)]) == 0
    assert "nic_gbps  50" in capsys.readouterr().out
    assert main(["--trace", str(tmp_path / "gone.json")]) == 2
