"""Paired differences of training runs: known values, and what the comparison has to refuse."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from recipes import quality
from recipes.measure.metrics import StepMetrics
from recipes.measure.paired import Difference, difference, t_quantile, t_within
from recipes.quality import Losses, Runs, final_losses, verdict


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423)],
)
def test_quantiles_are_those_of_the_printed_tables(degrees: int, quantile: float) -> None:
    """The column 0.975 of any table of Student's distribution."""
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=5e-5)


def test_quantiles_have_the_closed_forms_of_one_and_two_degrees() -> None:
    for probability in (0.6, 0.9, 0.975, 0.9995):
        assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-12)
        a = 2 * probability - 1
        assert t_quantile(probability, 2) == pytest.approx(a * math.sqrt(2 / (1 - a * a)), rel=1e-12)


def test_with_many_degrees_the_distribution_is_the_normal_one() -> None:
    assert t_within(1.959964, 100_000) == pytest.approx(0.95, abs=1e-4)
    assert t_quantile(0.95, 3) < t_quantile(0.975, 3), "the level would not matter"


@pytest.mark.parametrize("probability", [0.5, 1.0, 0.2])
def test_a_quantile_outside_the_upper_half_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        t_quantile(probability, 2)


def test_the_interval_of_student_s_own_data() -> None:
    """Additional hours of sleep by two drugs, ten patients (Biometrika 6, 1908, section IX): the mean
    difference is 1.58, t = 4.0621; the interval is 0.7001 to 2.4599 in every textbook."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = difference(second, first)
    scale = sum(first) / 10
    assert found.num_seeds == 10
    assert found.mean * scale == pytest.approx(1.58)
    assert (found.low * scale, found.high * scale) == pytest.approx((0.7001, 2.4599), abs=1e-4)


def test_pairing_removes_what_the_seeds_share() -> None:
    """Control: the same losses with their pairs mixed up have an interval that decides nothing."""
    stock = [2.0, 2.2, 2.4]
    ours = [2.001, 2.202, 2.401]
    assert difference(ours, stock).verdict(0.003) == "equal"
    assert difference([ours[1], ours[2], ours[0]], stock).verdict(0.003) == "undecided"


def test_an_interval_inside_the_margin_is_equal_outside_different_and_else_undecided() -> None:
    assert Difference(3, 0.0, 0.0).verdict(0.003) == "equal"
    assert Difference(3, 0.001, 0.0019).verdict(0.003) == "equal"
    assert Difference(3, 0.001, 0.0021).verdict(0.003) == "undecided"
    assert Difference(3, -0.006, 0.0021).verdict(0.003) == "different"
    assert Difference(3, 0.006, 0.0029).verdict(0.003) == "different"


def test_too_few_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        difference([2.0], [2.0])
    with pytest.raises(ValueError):
        difference([2.0, 2.0], [2.0, 2.0, 2.0])


def runs(**losses: list[float]) -> Runs:
    return {
        name: {seed: Losses(v, v + 0.1) for seed, v in enumerate(found)} for name, found in losses.items()
    }


STOCK = [2.00, 2.02, 2.04]


def shifted(*shares: float) -> list[float]:
    return [loss * (1 + share) for loss, share in zip(STOCK, shares, strict=True)]


def test_the_verdict_on_quality_notices_each_claim_that_fails() -> None:
    good = {
        "alltoall": STOCK,
        "bf16": STOCK,
        "fp8": shifted(0.0005, -0.0005, 0.0),
        "fp8_grad": shifted(0.0, 0.001, 0.0),
        "wrong_scale": shifted(0.010, 0.011, 0.009),
        "zero_experts": shifted(0.2, 0.2, 0.2),
        "zero_prob_grad": shifted(0.04, 0.04, 0.04),
    }
    text, holds = verdict(runs(**good))
    assert holds and "DOES NOT HOLD" not in text, text
    for name, losses in {
        "bf16": shifted(0.004, 0.004, 0.004),  # worse
        "fp8": shifted(-0.004, -0.004, -0.004),  # better is not equal
        "wrong_scale": STOCK,  # a test that lets the fault pass
        "zero_experts": shifted(0.0, 0.02, 0.04),  # not equal, and drowned in noise: not found
        "zero_prob_grad": shifted(-0.2, -0.2, -0.2),  # better than without the fault
    }.items():
        text, holds = verdict(runs(**(good | {name: losses})))
        assert not holds and text.count("DOES NOT HOLD") == 1, text
    noisy = verdict(runs(**(good | {"fp8": shifted(-0.01, 0.0, 0.01)})))
    assert not noisy[1], "noise that hides any difference counts as none"


def test_of_gradients_in_fp8_nothing_is_claimed() -> None:
    text, holds = verdict(runs(alltoall=STOCK, fp8_grad=shifted(0.05, 0.05, 0.05)))
    assert holds and "(different): no" in text


def test_runs_are_paired_by_seed_and_those_without_a_partner_left_out() -> None:
    found = runs(alltoall=STOCK, bf16=STOCK)
    found["bf16"][9] = Losses(99.0, 99.0)
    del found["bf16"][0]
    text, holds = verdict(found)
    assert holds and "| bf16 | 1, 2 |" in text, text
    del found["bf16"][1]
    assert not verdict(found)[1], "one seed proves nothing"


def test_a_run_counts_once_it_has_got_to_its_end(tmp_path: Path) -> None:
    def write(num_steps: int) -> None:
        steps = [
            StepMetrics(
                step=step, train_loss=10.0 - step, val_loss=5.0 if step == num_steps else None,
                tokens_per_s=1.0, dispatch_ms=1.0, combine_ms=1.0, dispatcher="alltoall",
            )
            for step in range(1, num_steps + 1)
        ]  # fmt: skip
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(asdict(m)) + "\n" for m in steps))

    assert final_losses(tmp_path, 9) is None
    write(8)
    assert final_losses(tmp_path, 9) is None
    write(9)
    assert final_losses(tmp_path, 9) == Losses(train=2.0, val=5.0)  # of 3, 2 and 1


def test_a_stopped_comparison_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[list[str]] = []

    def run_ranks(_num_ranks: int, argv: list[str]) -> int:
        if len(trained) == 2:
            return 130  # Ctrl-C in the third run
        trained.append(argv)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quality, "run_ranks", run_ranks)
    monkeypatch.setattr(
        quality, "final_losses",
        lambda folder, _steps: Losses(2.0, 2.0) if any(f"--run-dir={folder}" in a for a in trained) else None,
    )  # fmt: skip
    options = ["--seeds", "1", "2", "--variants", "alltoall", "bf16"]
    assert quality.main(options) == 130
    assert quality.main([*options, "--so-far"]) == 1 and len(trained) == 2
    assert "two seeds or more: DOES NOT HOLD" in capsys.readouterr().out
    monkeypatch.setattr(quality, "run_ranks", lambda _num, argv: trained.append(argv) or 0)  # type: ignore[func-returns-value]
    assert quality.main(options) == 0
    seeds_and_ways = [(a[1], a[3]) for a in trained]
    assert len(set(seeds_and_ways)) == len(trained) == 4, "a finished run was repeated"
