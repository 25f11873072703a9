"""How well the planner predicts what was measured and published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.machine import needs_kernels
from uccl_ep_train.errors import InputError
from uccl_ep_train.planner import events, fit, published
from uccl_ep_train.planner.accuracy import Summary
from uccl_ep_train.planner.machine import KERNELS, MACHINES

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def rows() -> list[fit.Row]:
    return fit.measured(BENCH / "results")


def predicted(rows: list[fit.Row]) -> list[fit.Row]:
    return [row for row in rows if not fit.is_fitted(row)]


def is_accurate(found: Summary) -> bool:
    return found.mean <= 0.04 and found.median <= 0.025 and found.within_15 >= 0.98 and found.most < 0.2


def of_windows(rows: list[fit.Row], least_domains: int = 1) -> list[fit.Row]:
    return [r for r in predicted(rows) if r.num_windows > 1 and len(r.shape.domains) >= least_domains]


@needs_kernels
def test_at_most_24_rows_are_fitted_and_many_others_are_not(rows: list[fit.Row]) -> None:
    fitted = [row for row in rows if fit.is_fitted(row)]
    assert len(fitted) == sum(map(len, fit._FITTED.values())) == 24
    assert len(predicted(rows)) == 227
    assert "h100_x2_two_domains.json" not in {row.file for row in fitted}
    assert not [row for row in fitted if row.shape.tokens == 1024]
    assert not [row for row in fitted if row.num_windows > 1 and len(row.shape.domains) > 1]


@needs_kernels
def test_the_rates_are_those_of_a_fit(rows: list[fit.Row]) -> None:
    kernels, hosts = fit.fit([row for row in rows if fit.is_fitted(row)])
    assert kernels.as_dict() == pytest.approx(KERNELS.as_dict(), rel=0.01)
    assert hosts == pytest.approx(fit.HOSTS, rel=0.01)
    assert MACHINES["h200"].host_us == pytest.approx(fit.HOSTS["h200_x4_windows.json"], rel=0.01)


@needs_kernels
def test_our_own_rows_are_predicted(rows: list[fit.Row]) -> None:
    found = Summary.of(fit.errors(predicted(rows), KERNELS))
    assert is_accurate(found), str(found)


@needs_kernels
@pytest.mark.parametrize(
    "wrong",
    [
        {"place_ns": 1.0},
        {"step_ns": 3.5},
        {"dispatch_us": 40.0},
        {"hop_us": 80.0},
        {"link_share": 0.5},
        {"dispatch_turn_us": 60.0},
        {"combine_turn_us": 60.0},
    ],
)
def test_a_wrong_rate_is_noticed(rows: list[fit.Row], wrong: dict[str, float]) -> None:
    assert not is_accurate(Summary.of(fit.errors(predicted(rows), KERNELS.with_values(wrong))))


def windows_are_predicted(rows: list[fit.Row], *fitted: Any) -> bool:
    found = Summary.of(fit.errors(of_windows(rows), *fitted))
    between = Summary.of(fit.errors(of_windows(rows, least_domains=2), *fitted))
    return found.mean <= 0.025 and found.most < 0.1 and between.mean <= 0.015


@needs_kernels
def test_several_windows_are_predicted(rows: list[fit.Row]) -> None:
    """Up to 19 windows of today's layout, in one, two and four domains, of kernels that overlap them."""
    windows = of_windows(rows)
    assert len(windows) == 66 and {len(r.shape.domains) for r in windows} == {1, 2, 4}
    assert max(r.num_windows for r in windows) >= 16
    assert windows_are_predicted(rows, KERNELS)


@needs_kernels
def test_windows_that_were_counted_are_those_predicted(rows: list[fit.Row]) -> None:
    row = next(r for r in of_windows(rows, least_domains=4) if r.op == "combine" and r.shape.tokens == 4096)
    for windows in (1, 2, 9, 16, 22):
        counted = replace(row, windows=windows)
        assert counted.num_windows == windows
        assert abs(fit.errors([counted], KERNELS)[0]) < 0.2
    assert row.windows == 0 and row.num_windows > 1


@needs_kernels
def test_windows_that_do_not_overlap_are_noticed(
    rows: list[fit.Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a window that begins when the last one has ended. No rates make up for it."""
    monkeypatch.setattr(events, "HALVES", 1)
    assert not windows_are_predicted(rows, KERNELS)
    found = Summary.of(fit.errors(of_windows(rows, least_domains=2), KERNELS))
    assert found.mean > 0.04 and found.most > 0.2, str(found)
    assert not windows_are_predicted(rows, *fit.fit([row for row in rows if fit.is_fitted(row)], steps=20))


@needs_kernels
def test_no_single_rate_is_that_of_all_hosts(rows: list[fit.Row]) -> None:
    """Control: whatever one host takes behind the counts, new plans measured on another are far off."""
    new = [row for row in rows if row.file in fit.HOSTS and row.plan == "new" and row.shape.tokens == 128]
    assert len(new) == 15 and max(abs(fit.errors(new, KERNELS))) < 0.2
    for host_us in range(5, 100, 5):
        one = dict.fromkeys(fit.HOSTS, float(host_us))
        assert max(abs(fit.errors(new, KERNELS, one))) > 0.2, host_us


def test_one_host_differs_between_jobs() -> None:
    """The same calls on one machine: jobs agree where the host reads no counts."""
    found = fit.jobs(BENCH / "results")
    assert {len(rows) for rows in found.values()} == {3} and len(found) == 18

    def spread(kind: str) -> float:
        times = [row.us for row in found[kind]]
        return max(times) / min(times) - 1

    for rows in ("bf16", "fp8", "codes"):
        assert spread(f"1 x 2 dispatch {rows} sync_free") < 0.03
    assert spread("1 x 2 dispatch bf16 new") > 0.4


def test_published_rows_are_predicted_with_each_size_held_out() -> None:
    figures = published.read(BENCH / "published.json")
    found = Summary.of([error for _, error in published.held_out(figures)])
    assert found.rows == 39 and found.median <= 0.05 and found.within_15 >= 0.8, str(found)
    assert found.mean <= 0.06 and found.most < 0.25
    named = [f for f in figures if f.anomaly]
    assert {(f.system, f.op) for f in named} == {("UCCL-EP H200 EFA", "combine")} and len(named) == 3
    assert not {f.system for f in figures if f.use == "compare"} & {
        f.system for f, _ in published.held_out(figures)
    }
    compared = Summary.of([error for _, error in published.compared(figures)])
    assert compared.rows == 13 and compared.median <= 0.06, str(compared)


def test_the_named_anomalies_are_none_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another fixed time, and rows that no such model can follow, are noticed."""
    figures = published.read(BENCH / "published.json")
    anomalies = [f for f in figures if f.anomaly]
    rates = published.fit(anomalies)
    assert max(abs(published.predict(f, rates) / f.us - 1) for f in anomalies) > 0.2
    monkeypatch.setattr(published, "predict", lambda figure, rates: 0.5 * figure.us + rates[0])
    assert Summary.of([e for _, e in published.held_out(figures)]).median > 0.05


def test_files_that_are_missing_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        fit.measured(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        fit.jobs(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        published.read(tmp_path / "published.json")
