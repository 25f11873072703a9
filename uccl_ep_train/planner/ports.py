"""What waits in the event model: a port's tasks, a stream's chunks, an actor's turns; and what comes out."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from uccl_ep_train.planner.clock import Clock


@dataclass(frozen=True)
class Outcome:
    """us: until the last rank is through. busy_us: of each port, on the rank where it is busiest."""

    us: float
    busy_us: dict[str, float]
    num_windows: int

    @property
    def binds(self) -> tuple[str, float]:
        """The busiest port and its microseconds; "latency" with all that no port is busy for, if that is
        more."""
        name, most = max(self.busy_us.items(), key=lambda item: item[1])
        idle = self.us - most
        return ("latency", idle) if idle > most else (name, most)


class Port:
    """Does one thing at a time, in the order of the calls."""

    def __init__(self) -> None:
        self.free = 0.0
        self.busy = 0.0

    def take(self, now: float, us: float) -> float:
        self.free = max(self.free, now) + us
        self.busy += us
        return self.free


@dataclass
class Part:
    """What an actor gets (dispatch) or gives (combine) of a stream."""

    actor: int
    rows: float
    pairs: float
    remote_rows: float  # that cross NVLink


@dataclass
class Stream:
    """Rows of `source` for one domain, of an operation. At `rail` they enter it; of the own domain: the
    source itself."""

    source: int
    rail: int
    rows: float
    parts: list[Part]
    is_own: bool
    number: int = 0  # among those of its rail
    credits: int = 0
    left: int = 0  # chunks that have left
    made: int = 0  # chunks that are begun
    waiting: deque[Chunk] = field(default_factory=deque)  # for a credit
    blocked: Callable[[], None] | None = None  # waits until a chunk has left


@dataclass(frozen=True)
class Chunk:
    """Rows of a stream that go together. share: of the stream's rows."""

    stream: Stream
    window: int
    rows: float
    share: float


class Turns:
    """Tasks of an actor by turn: those of later turns wait until all of the earlier ones have ended."""

    def __init__(self, counts: Counter[int], clock: Clock, ended: Callable[[int], float]) -> None:
        """counts: tasks of each turn. ended: called at the end of a turn, gives the pause before the next."""
        self.order = deque(sorted(counts))
        self.counts, self.clock, self.ended = counts, clock, ended
        self.latest = 0.0
        self.queue: dict[int, deque[Callable[[], float]]] = defaultdict(deque)

    def add(self, turn: int, task: Callable[[], float]) -> None:
        """task: takes ports at the clock's time, and gives when it ends."""
        if self.order and turn == self.order[0]:
            self._run(turn, task)
        else:
            self.queue[turn].append(task)

    def _run(self, turn: int, task: Callable[[], float]) -> None:
        self.latest = max(self.latest, task())
        self.counts[turn] -= 1
        if self.counts[turn] == 0:
            self.clock.at(self.latest, lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        pause = self.ended(turn)
        self.clock.at(self.clock.now() + pause, self._next)

    def _next(self) -> None:
        self.order.popleft()
        if self.order:
            waiting = self.queue.pop(self.order[0], deque())
            for task in waiting:
                self._run(self.order[0], task)
