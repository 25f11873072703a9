"""Low latency goes on without killed or frozen processes, in one domain and between domains."""

from __future__ import annotations

import pytest

from tests.masks import LOSSES, lose

pytestmark = [pytest.mark.fault, pytest.mark.waits]


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize(("layout", "victim", "lost"), LOSSES)
def test_the_others_go_on_with_exact_sums(layout: str, victim: int, lost: list[int], how: str) -> None:
    lose("host", layout, victim, lost, how)
