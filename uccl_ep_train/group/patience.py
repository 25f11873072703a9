"""Deadlines that stop while this process is paused, as in a stopped container or a suspended machine.

A rank must not blame peers for its own pause. A waiting thread checks a few times a second; a longer gap
between checks is a pause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STEP_S = 0.5
"""The most that passes between two looks."""
LOOK_S = 0.1


class Patience:
    """A deadline in `seconds`, checked by `left_s` or `over`."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._looked = time.monotonic()

    def left_s(self) -> float:
        """Seconds left; 0 or less: it is over."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked, STEP_S)
        self._looked = now
        return self._left_s

    def over(self) -> bool:
        return self.left_s() <= 0

    def wait_for(self, changed: threading.Condition, condition: Callable[[], bool]) -> bool:
        """As `changed.wait_for`, for the time left."""
        while not (holds := condition()) and (left_s := self.left_s()) > 0:
            changed.wait(min(left_s, LOOK_S))
        return holds


class PatientTimer(threading.Timer):
    """As its base, but a pause of the process does not trigger it."""

    def run(self) -> None:
        patience = Patience(self.interval)
        while not self.finished.is_set() and (left_s := patience.left_s()) > 0:
            self.finished.wait(min(left_s, LOOK_S))
        if not self.finished.is_set():
            self.function(*self.args, **self.kwargs)
        self.finished.set()
