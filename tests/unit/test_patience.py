"""Deadlines of creation stand still while the process does."""

from __future__ import annotations

import threading
import time

import pytest

from uccl_ep_train.group import patience
from uccl_ep_train.group.patience import STEP_S, Patience, PatientTimer


class Clock:
    """Stands in for the host's, which runs on while a process is stopped."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(patience, "time", made)
    return made


def test_time_that_is_looked_at_counts(clock: Clock) -> None:
    """Control: a deadline passes as it should."""
    waits = Patience(1.0)
    for _ in range(9):
        clock.now += 0.1
        assert not waits.over()
    clock.now += 0.2
    assert waits.over()


def test_a_pause_counts_as_one_step(clock: Clock) -> None:
    waits = Patience(2 * STEP_S)
    clock.now += 1e6
    assert not waits.over()
    assert waits.left_s() == pytest.approx(STEP_S)
    clock.now += 1e6
    assert waits.over()


def test_a_condition_that_comes_true_ends_a_wait_and_a_deadline_too() -> None:
    changed, came = threading.Condition(), threading.Event()
    with changed:
        assert not Patience(0.05).wait_for(changed, came.is_set)
        came.set()
        assert Patience(30.0).wait_for(changed, came.is_set)


def test_a_timer_goes_off_unless_it_is_cancelled() -> None:
    fired = [threading.Event(), threading.Event()]
    timers = [PatientTimer(0.05, event.set) for event in fired]
    timers[1].cancel()
    for timer in timers:
        timer.start()
    assert fired[0].wait(30)
    time.sleep(0.2)
    assert not fired[1].is_set()
