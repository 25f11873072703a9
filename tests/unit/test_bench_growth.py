"""What `bench/growth.py` measures, and the exponents that it gives."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench import growth


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.15, 2.0])
def test_the_exponent_of_a_power_of_the_ranks_is_its_own(exponent: float) -> None:
    assert growth.slope({ranks: 3.0 * ranks**exponent for ranks in (16, 32, 64, 128)}) == exponent


def test_near_experts_are_in_two_domains_whatever_their_number() -> None:
    """Control: uniform experts are in more where there are more."""
    for ranks, domain_size in ((16, 8), (32, 8), (128, 8), (16, 1)):
        generator = torch.Generator().manual_seed(ranks)
        of_domain = domain_size * growth.EXPERTS_PER_RANK
        domains_TK = growth.near(ranks - 1, ranks, domain_size, generator) // of_domain
        own = (ranks - 1) // domain_size
        assert (domains_TK[:, :2] == own).all() and (domains_TK[:, 2:] != own).all()
        assert (domains_TK[:, 2] == domains_TK[:, 3]).all() and int(domains_TK.max()) < ranks // domain_size
    uniform_TK = growth.uniform(0, 128, 8, torch.Generator().manual_seed(1)) // (8 * growth.EXPERTS_PER_RANK)
    assert max(row.unique().numel() for row in uniform_TK) > 2


def test_a_run_measures_all_operations_and_records_say_the_median() -> None:
    args = argparse.Namespace(routing="near", domain_size=2, runs=3, calls=1)
    run = growth.measured(4, args)
    assert set(run) == set(growth.OPS) and all(value > 0 for value in run.values())
    runs = {4: [run, dict.fromkeys(growth.OPS, 1e-3), dict.fromkeys(growth.OPS, 1000000000.0)], 8: [run]}
    records = growth.records_of(args, runs)
    assert [record["op"] for record in records] == [f"growth of {op}" for op in growth.OPS]
    for op, record in zip(growth.OPS, records, strict=True):
        assert record["median_cpu_ms"][4] == pytest.approx(run[op], abs=0.06)
        assert record["cpu_ms"][8] == [run[op]]


def test_a_run_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="3 ranks: "):
        growth.measured(3, argparse.Namespace(routing="near", domain_size=2, calls=1))
