"""What the benchmark prints and writes, and how it drives our buffer; with stand-ins for what is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import deep_ep_peers, lineup, plot, report, systems
from bench.cases import BACKWARD, OPS, Case, Traffic
from bench.lineup import describe
from bench.measure import Measured, difference_of
from bench.systems import Sample, System, UcclEp
from uccl_ep_train import EpConfig

CASE = Case(
    tokens=4, hidden=128, topk=1, experts=2, ranks=2, domains=1, dtype="fp8", routing="uniform",
    link_gbytes_per_s=0.0, num_sms=24, stage_sms=132,
)  # fmt: skip
REQUIRED = (
    "system", "op", "dtype", "layout", "tokens", "hidden", "topk", "experts", "ranks", "domains",
    "link_gbytes_per_s", "num_sms", "stage_sms", "end_to_end", "median_us", "p10_us", "p90_us", "wire_bytes",
    "logical_bytes", "windows", "steps_us", "commit", "hardware",
)  # fmt: skip
ABOUT = {"commit": "c", "hardware": "h"}


def a_system(name: str, *, backward: bool = False) -> System:
    found: Any = SimpleNamespace(
        name=name, mode="uncached", dtype="fp8", layout="expert_major", num_sms=24, end_to_end=True,
        stage_sms=132 if name.startswith(report.OURS) else 0,
        ops=(*OPS, BACKWARD) if backward else OPS, label=f"{name} fp8",
    )  # fmt: skip
    return found


def measured(name: str, factor: float = 1.0, *, backward: bool = False) -> Measured:
    system = a_system(name, backward=backward)
    times = {"dispatch": [1.0, 2.0, 3.0], "combine": [30.0, 20.0, 10.0], BACKWARD: [100.0, 100.0, 100.0]}
    return Measured(
        system=system,
        wall_us={op: factor * torch.tensor(times[op]) for op in system.ops},
        cpu_us={op: torch.tensor(times[op]) for op in system.ops},
        steps_us={op: {"place": 1.5} if op == "dispatch" else {} for op in system.ops},
        wire_bytes=dict.fromkeys(system.ops, 7),
        link_bytes=dict.fromkeys(system.ops, 0),
        logical_bytes=1000,
        windows={op: 3 if op == "dispatch" else 4 for op in system.ops},
    )


def records() -> list[report.Record]:
    entries = [measured("uccl_ep", backward=True), measured("peer", 2.0)]
    return report.records_of(CASE, entries, {"uccl_ep_sync_free fp8": "ConfigError: too small"}, ABOUT)


def test_records_have_every_required_field_whether_a_system_ran_or_not() -> None:
    found = records()
    assert [(r["system"], r["op"]) for r in found] == [
        ("uccl_ep", "dispatch"), ("uccl_ep", "combine"), ("uccl_ep", report.PAIR), ("uccl_ep", BACKWARD),
        ("peer", "dispatch"), ("peer", "combine"), ("peer", report.PAIR), ("uccl_ep_sync_free", report.PAIR),
    ]  # fmt: skip
    assert all(list(r) == list(found[0]) for r in found) and set(REQUIRED) <= set(found[0])
    assert found[-1]["not_run"] == "ConfigError: too small" and found[-1]["median_us"] is None
    assert found[0]["commit"] == "c" and found[0]["num_sms"] == 24
    assert [r["stage_sms"] for r in found] == [132] * 4 + [0] * 3 + [132]  # ours, the peer, what was refused


def test_times_of_both_are_added_in_each_run_and_bytes_by_exchange() -> None:
    dispatch, _, pair, backward = records()[:4]
    assert (dispatch["median_us"], pair["median_us"]) == (2.0, 22.0)
    assert (pair["p10_us"], pair["p90_us"]) == (14.8, 29.2)  # of 31, 22, 13
    assert (dispatch["logical_bytes"], pair["logical_bytes"], backward["logical_bytes"]) == (1000, 2000, 4000)
    assert (dispatch["wire_bytes"], pair["wire_bytes"]) == (7, 14)
    assert pair["steps_us"] == {"place": 1.5} and pair["windows"] == 7


def test_json_is_a_list_of_records(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    report.write_json(records(), path)
    assert json.loads(path.read_text()) == records()


def test_the_table_has_a_line_for_what_did_not_run() -> None:
    lines = report.table(records()).splitlines()
    assert len(lines) == 1 + 8
    assert lines[1].startswith("uccl_ep fp8") and lines[-1] == (
        "uccl_ep_sync_free  not run: ConfigError: too small"
    )
    nothing = report.records_of(CASE, [], {"all": "because"}, ABOUT)
    assert report.table(nothing) == "all  not run: because"


def test_ratios_compare_us_with_peers_in_what_both_did() -> None:
    entries = [measured("uccl_ep", backward=True), measured("uccl_ep_cached"), measured("peer", 2.0)]
    lines = report.paired_ratios(entries)
    assert len(lines) == 2 and all("2.00 x as fast as peer" in line for line in lines)
    assert any(BACKWARD in x for x in report.paired_ratios([entries[0], measured("peer", backward=True)]))


def test_curves_and_bars_leave_out_what_did_not_run() -> None:
    more = [r | {"tokens": 2} for r in records()]
    curves = plot.curves_of(records() + more)
    assert list(curves) == ["uccl_ep fp8", "peer fp8"]
    assert curves["peer fp8"] == [(2, 2000 / 44 / 1e3), (4, 2000 / 44 / 1e3)]
    stacks = plot.stacks_of(records())
    assert stacks == {
        "uccl_ep fp8, T=4": {"place": 1.5, "combine": 20.0},
        "peer fp8, T=4": {"place": 1.5, "combine": 40.0},
    }


def test_a_peer_that_was_measured_in_two_cases_is_drawn_once() -> None:
    assert plot.stacks_of(records() + records()) == plot.stacks_of(records())
    assert plot.curves_of(records() + records()) == plot.curves_of(records())


def test_a_label_names_what_differs_and_nothing_else() -> None:
    swept = records()[:7] + [r | {"num_sms": 8, "routing": "zipf"} for r in records()[:3]]
    labels = list(plot.curves_of(swept))
    assert labels == [
        "uccl_ep fp8, uniform, 24 SMs",
        "peer fp8, uniform, 24 SMs",
        "uccl_ep fp8, zipf, 8 SMs",
    ]


def test_zero_and_another_value_of_one_system_are_two_curves() -> None:
    swept = [r | {"stage_sms": 0} for r in records()[:7]] + records()[:7]
    assert list(plot.curves_of(swept)) == ["uccl_ep fp8", "peer fp8", "uccl_ep fp8, 132 SMs for staging"]
    assert list(plot.curves_of(records())) == ["uccl_ep fp8", "peer fp8"]


def test_the_png_is_written_even_if_nothing_ran(tmp_path: Path) -> None:
    for name, found in (("all", records()), ("none", report.records_of(CASE, [], {"all": "x"}, ABOUT))):
        plot.write_png(found, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_commit_is_that_of_the_option_else_of_the_environment_else_of_git(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_git(*_: str) -> str:
        raise OSError("no git")

    found = []
    for git in (lambda *arguments: "head" if "rev-parse" in arguments else "", no_git):
        monkeypatch.setattr(report, "_git", git)
        monkeypatch.delenv("BENCH_COMMIT", raising=False)
        found += [report.commit(), report.commit("abc")]
        monkeypatch.setenv("BENCH_COMMIT", "def")
        found += [report.commit(), report.about_here("abc")["commit"]]
    assert found == ["head", "abc", "def", "abc", "unknown", "abc", "def", "abc"]


def test_a_reason_is_one_line() -> None:
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(AssertionError()) == "AssertionError: no text"


def test_bf16_rows_have_to_be_equal_and_sums_nearly() -> None:
    ours, peer = a_system("uccl_ep"), a_system("peer")
    ours.dtype = "bf16"
    ones = {"rows": torch.ones(2, 2), "output": torch.ones(2, 2)}
    nearly = torch.ones(2, 2) * 1.001
    assert difference_of(ours, ones | {"output": nearly}, peer, ones) == ""
    assert difference_of(ours, ones | {"rows": nearly}, peer, ones).startswith("rows differ")
    assert "output" in difference_of(ours, ones | {"output": torch.full((2, 2), float("nan"))}, peer, ones)


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For `setitem(sys.modules, "deep_ep", ...)`; what was found is forgotten before and after."""
    deep_ep_peers._library.cache_clear()
    yield monkeypatch
    deep_ep_peers._library.cache_clear()


def test_deep_ep_is_measured_with_the_buffers_that_it_has(deep_ep: pytest.MonkeyPatch) -> None:
    deep_ep.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=object, ElasticBuffer=object))
    assert deep_ep_peers.about_deep_ep() == "deep_ep is measured with Buffer, ElasticBuffer"
    assert [label for label, _ in deep_ep_peers.importable(CASE)] == [
        "deep_ep_v1 fp8", "deep_ep_v1_cached fp8",
        "deep_ep_v2 fp8", "deep_ep_v2_sync_free fp8", "deep_ep_v2_cached fp8",
    ]  # fmt: skip


def test_a_deep_ep_that_cannot_be_imported_is_one_line(deep_ep: pytest.MonkeyPatch) -> None:
    deep_ep.setitem(sys.modules, "deep_ep", None)
    assert deep_ep_peers.about_deep_ep().startswith("deep_ep is not measured: ModuleNotFoundError")
    assert list(deep_ep_peers.importable(CASE)) == []
    deep_ep_peers._library.cache_clear()
    deep_ep.setitem(sys.modules, "deep_ep", SimpleNamespace())
    assert deep_ep_peers.about_deep_ep() == (
        "deep_ep is not measured: it has none of Buffer, ElasticBuffer, HybridEPBuffer"
    )


def test_a_system_that_was_asked_for_and_has_nothing_to_run_is_a_record(deep_ep: pytest.MonkeyPatch) -> None:
    deep_ep.setitem(sys.modules, "deep_ep", None)
    for on_gpu, asked, reason in (
        (False, "torch_autograd", "it is for --backward on GPUs"),
        (False, "deep_ep", "ModuleNotFoundError"),
        (True, "memcpy", "it is the floor on CPUs"),
    ):
        deep_ep.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        found = report.records_of(
            CASE, [], lineup.line_up(CASE, [asked], backward=False, compact=False).refused, ABOUT
        )
        assert [r["system"] for r in found] == [asked] and found[0]["not_run"].startswith(reason)
        deep_ep.setattr(lineup, "SYSTEMS", (asked,))
        assert not lineup.line_up(CASE, None, backward=False, compact=False).refused, "nobody asked for it"


class _Buffer:
    """Records what it is called with."""

    def __init__(self, overflow: bool = False, stats: dict[str, float] | None = None) -> None:
        self.config = SimpleNamespace(num_sms=24, grad_dtype="bf16")
        self.device = torch.device("cpu")
        self.calls: list[dict[str, Any]] = []
        self._overflow = overflow
        self._stats = stats or {}

    def dispatch(self, x: Any, topk_idx: Any = None, topk_weights: Any = None, **options: Any) -> Any:
        self.calls.append({"topk_idx": topk_idx, **options})
        return SimpleNamespace(
            rows=torch.zeros(options.get("capacity", 3), 128),
            tokens_per_expert=torch.tensor([3]),
            handle="plan",
            overflow=torch.tensor(self._overflow),
        )

    def combine(self, rows: torch.Tensor, handle: str) -> torch.Tensor:
        self.calls.append({"rows": rows.shape[0], "handle": handle})
        return torch.zeros(4, 128)

    def stats(self) -> dict[str, float]:
        return self._stats


@pytest.mark.parametrize(("num_sms", "stage_sms"), [(0, 0), (24, 0), (24, 132)])
def test_a_buffer_is_given_the_sms_that_the_case_names(
    num_sms: int, stage_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UCCL_EP_NUM_SMS", "UCCL_EP_STAGE_SMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(systems, "Buffer", lambda _, config: config)
    config: Any = UcclEp.create_buffer(replace(CASE, num_sms=num_sms, stage_sms=stage_sms))
    assert (config.num_sms, config.stage_sms) == (24, stage_sms or None)


@pytest.mark.parametrize(("device", "expected"), [("cuda", (24, 132)), ("cpu", (0, 0))])
def test_sms_are_recorded_of_gpus_only(device: str, expected: tuple[int, int]) -> None:
    buffer: Any = SimpleNamespace(
        config=EpConfig(num_experts=8, hidden=128, num_sms=24, stage_sms=132), device=torch.device(device)
    )
    system = UcclEp(buffer, "bf16", mode="uncached")
    assert (system.num_sms, system.stage_sms) == expected


def bound(buffer: _Buffer, mode: str) -> UcclEp:
    fake: Any = buffer
    system = UcclEp(fake, "bf16", mode=mode)
    idx = torch.tensor([[[0], [0], [1], [1]], [[0], [1], [1], [1]]])
    system.bind(Sample(torch.zeros(4, 128), idx[0], torch.ones(4, 1), Traffic(CASE, idx)))
    for op in OPS:
        system.run(op)
    return system


def test_sync_free_sets_aside_the_capacity_and_shows_the_rows_that_came() -> None:
    buffer = _Buffer()
    system = bound(buffer, "sync_free")
    system.check()
    assert system.name == "uccl_ep_sync_free"
    assert buffer.calls[0]["capacity"] == 128 and buffer.calls[0]["handle"] is None
    assert buffer.calls[1] == {"rows": 128, "handle": "plan"}
    assert system.results()["rows"].shape == (3, 128)


def test_an_overflow_is_a_fault() -> None:
    with pytest.raises(RuntimeError, match="not enough"):
        bound(_Buffer(overflow=True), "sync_free").check()


@pytest.mark.parametrize(("mode", "handles"), [("uncached", [None]), ("cached_plan", [None, "plan"])])
def test_only_the_cached_mode_knows_the_plan(mode: str, handles: list[str | None]) -> None:
    buffer = _Buffer()
    bound(buffer, mode)
    calls = [call for call in buffer.calls if "rows" not in call]
    assert [call.get("handle") for call in calls] == handles
    assert not any("capacity" in call for call in calls)
    assert (calls[-1]["topk_idx"] is None) == (mode == "cached_plan")


def test_steps_are_what_the_buffer_counts_of_them() -> None:
    stats = {"step_seconds.place": 1.0, "busy_seconds.stage": 2.0, "proxy.busy_seconds": 3.0}
    assert bound(_Buffer(stats=stats), "uncached").step_seconds() == {"stage": 2.0, "place": 1.0}
    assert bound(_Buffer(), "uncached").step_seconds() == {}
