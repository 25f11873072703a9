"""Commands from a GPU come out of the ring as they went in, whoever is faster."""

from __future__ import annotations

from typing import Any

import pytest

from tests.machine import needs_gpus
from uccl_ep_train.core.native import load_native
from uccl_ep_train.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]


def measure(capacity: int, commands: int, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = load_native().measure_gpu_queue(0, capacity, commands, **options)
    return found


@pytest.mark.parametrize("capacity", [1, 2, 64, 4096])
@pytest.mark.parametrize("pause_usec", [0, 100])
def test_every_command_arrives_whole_and_in_order(capacity: int, pause_usec: int) -> None:
    """A consumer that pauses lets the ring fill up; one that does not finds it empty."""
    found = measure(capacity, min(200_000, 400 * capacity + 1), pause_usec=pause_usec)
    assert found["wrong"] == 0
    assert len(found["round_trip_usec"]) == 1000
    assert 0 < min(found["round_trip_usec"]) <= max(found["round_trip_usec"]) < 5e6


def test_a_command_that_is_not_the_expected_one_is_counted() -> None:
    """Control: a consumer that expects the next serial finds every command wrong."""
    assert measure(64, 1000, first=1)["wrong"] == 2000


def test_a_ring_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity = 3 is no power of two"):
        measure(3, 10)
