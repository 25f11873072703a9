"""Low latency on GPUs goes on without killed or frozen processes, in one domain and between domains."""

from __future__ import annotations

import pytest

from tests.machine import needs_gpus
from tests.masks import LOSSES, lose

pytestmark = [pytest.mark.gpu, pytest.mark.fault, needs_gpus()]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize(("layout", "victim", "lost"), LOSSES)
def test_the_others_go_on_with_exact_sums(layout: str, victim: int, lost: list[int], how: str) -> None:
    lose("cuda", layout, victim, lost, how)
