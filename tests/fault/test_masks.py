"""Low latency goes on without killed or frozen processes, in one domain and between domains."""

from __future__ import annotations

import pytest

from tests.machine import lacks_tcp
from tests.masks import LOSSES, lose

pytestmark = [pytest.mark.fault, pytest.mark.waits]


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize(("layout", "victim", "lost"), LOSSES)
def test_the_others_go_on_with_exact_sums(layout: str, victim: int, lost: list[int], how: str) -> None:
    lose("host", layout, victim, lost, how)


BETWEEN_DOMAINS = [loss for loss in LOSSES if loss[0] not in ("1x2", "1x4")]


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize(("layout", "victim", "lost"), BETWEEN_DOMAINS)
def test_connections_of_libfabric_may_break(layout: str, victim: int, lost: list[int], how: str) -> None:
    if lacks_tcp():
        pytest.skip(lacks_tcp())
    lose("host", layout, victim, lost, how, settings=[{"transport": "ofi", "ofi_provider": "tcp"}])
