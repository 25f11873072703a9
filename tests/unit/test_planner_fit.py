"""How well the planner predicts what was measured and published: see docs/planner.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from uccl_ep_train.core import cuda
from uccl_ep_train.errors import InputError
from uccl_ep_train.planner import fit, published
from uccl_ep_train.planner.accuracy import Summary
from uccl_ep_train.planner.machine import KERNELS

BENCH = Path(__file__).resolve().parents[2] / "bench"
needs_kernels = pytest.mark.skipif(not cuda.built(), reason="cuda.built() is False: no layout of GPUs")


@pytest.fixture(scope="module")
def rows() -> list[fit.Row]:
    return fit.measured(BENCH / "results")


def predicted(rows: list[fit.Row]) -> list[fit.Row]:
    return [row for row in rows if not fit.is_fitted(row)]


def is_accurate(found: Summary) -> bool:
    return found.mean <= 0.05 and found.median <= 0.03 and found.within_15 >= 0.94 and found.above_20 <= 0.03


def test_at_most_24_rows_are_fitted_and_many_others_are_not(rows: list[fit.Row]) -> None:
    fitted = [row for row in rows if fit.is_fitted(row)]
    assert len(fitted) == sum(map(len, fit._FITTED.values())) == 24
    assert len(predicted(rows)) == 149
    assert not {"h200_x4_four_domains.json", "h100_x2_two_domains.json"} & {row.file for row in fitted}
    assert not [row for row in fitted if row.shape.tokens not in (128, 4096)]


@needs_kernels
def test_the_rates_are_those_of_a_fit(rows: list[fit.Row]) -> None:
    again = fit.fit([row for row in rows if fit.is_fitted(row)])
    assert again.as_dict() == pytest.approx(KERNELS.as_dict(), rel=0.01)


@needs_kernels
def test_our_own_rows_are_predicted(rows: list[fit.Row]) -> None:
    """Rows above 20 % are new plans of 128 tokens, whose time is the host's and differs between runs."""
    others = predicted(rows)
    errors = fit.errors(others, KERNELS)
    assert is_accurate(Summary.of(errors)), str(Summary.of(errors))
    far = [row for row, error in zip(others, errors, strict=True) if abs(error) > 0.2]
    assert {(row.plan, row.shape.tokens) for row in far} <= {("new", 128)}
    assert max(abs(errors)) < 0.35


@needs_kernels
@pytest.mark.parametrize(
    "wrong",
    [{"place_ns": 1.0}, {"step_ns": 3.5}, {"dispatch_us": 40.0}, {"hop_us": 80.0}, {"link_share": 0.5}],
)
def test_a_wrong_rate_is_noticed(rows: list[fit.Row], wrong: dict[str, float]) -> None:
    assert not is_accurate(Summary.of(fit.errors(predicted(rows), KERNELS.with_values(wrong))))


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
        published.read(tmp_path / "published.json")
