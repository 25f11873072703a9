"""Time as a seam: what runs on a `Clock` runs in simulated time or in real time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Protocol

Action = Callable[[], None]


class Clock(Protocol):
    """Times are microseconds since the clock was made."""

    def now(self) -> float:
        """The present time."""

    def at(self, when: float, action: Action) -> None:
        """Runs `action` at `when`, or at once if that is over. Actions of one time run in the order of the
        calls."""

    def run(self) -> float:
        """Runs actions until none is left; the time then."""


class SimulatedClock:
    """Time passes from one action to the next at once."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = 0
        self._waiting: list[tuple[float, int, Action]] = []

    def now(self) -> float:
        return self._now

    def at(self, when: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (max(when, self._now), self._count, action))

    def run(self) -> float:
        while self._waiting:
            self._now, _, action = heapq.heappop(self._waiting)
            action()
        return self._now


class RealClock(SimulatedClock):
    """CLOCK_MONOTONIC; an action runs at its time or shortly after."""

    def __init__(self) -> None:
        super().__init__()
        self._begin = time.monotonic()

    def now(self) -> float:
        return 1e6 * (time.monotonic() - self._begin)

    def run(self) -> float:
        while self._waiting:
            left = self._waiting[0][0] - self.now()
            if left > 0:
                time.sleep(1e-6 * left)
            heapq.heappop(self._waiting)[2]()
        return self.now()
