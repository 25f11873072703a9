"""The figure of the proxies: 2 million empty chunks a second and thread through loop, in processor time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import posting_rate


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("window", posting_rate.WINDOWS)
def test_a_proxy_thread_ships_two_million_commands_a_second(
    window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = posting_rate.record_of(_program(tmp_path_factory), window, 1, 0.3)
    assert record["commands_per_s"] >= 2e6
    assert record["arrivals_per_s"] >= 2e6


_programs: list[Path] = []


def _program(factory: pytest.TempPathFactory) -> Path:
    if not _programs:
        _programs.append(posting_rate.build(factory.mktemp("posting_rate")))
    return _programs[0]
