"""The event model of one operation: windows and chunks that wait for ports, credits, plans and flags.

A *port* does one thing at a time: the SMs that stage, place, fold or merge; a rank's NVLink (in); its NIC,
out and in; its proxy. A chunk passes stage, proxy, NIC, wire, NIC, the poller that sees it, NVLink and SMs.

One kernel does all windows (csrc/backend/gpu/dispatch.cu, combine.cu). Memory has two halves, so a rank
stages window w while w - 1 is placed, and folds w while w - 1 is merged: it waits until all members of its
domain have ended w - 2. A chunk's credit comes back when its window has ended there. Where a combine's
streams go in batches, tokens take a window for each batch, and own tokens are merged in the last of them.

Under uniform load one actor stands for all: what arrives at it is, by symmetry, what it sends. Otherwise
every rank is an actor, and in large groups several chunks go as one. Not modelled: congestion inside the
network, loss, queue-pair caches, HBM, low latency.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from uccl_ep_train.errors import InputError
from uccl_ep_train.planner.clock import Clock, SimulatedClock
from uccl_ep_train.planner.costs import Costs, packet_bytes
from uccl_ep_train.planner.machine import Machine
from uccl_ep_train.planner.ports import Chunk, Outcome, Part, Port, Stream, Turns
from uccl_ep_train.planner.protocol import Protocol
from uccl_ep_train.planner.shape import Shape
from uccl_ep_train.planner.streams import in_batches, streams_of

PLANS = ("cached", "sync_free", "new")
"""A known plan; a new one whose counts stay on the GPU; a new one whose counts the host reads."""
HALVES = 2  # of memory, a window each: kHalves in csrc/backend/gpu/layout.h
_TILE_TOKENS = 64  # routed and staged together
_MOST_GRANULES = 64  # that the own domain's tokens of a window are cut into
_MOST_TASKS = 200_000  # of an operation, about; beyond that several chunks go as one
_PORTS = ("stage", "proxy", "nic out", "nic in", "nvlink", "place", "fold", "merge")


class _Operation:
    """One operation on a clock. Every method runs at the clock's time or schedules for later."""

    def __init__(
        self,
        machine: Machine,
        shape: Shape,
        protocol: Protocol,
        op: str,
        plan: str,
        *,
        every: bool,
        clock: Clock,
    ) -> None:
        self.machine, self.shape, self.protocol, self.op, self.plan = machine, shape, protocol, op, plan
        self.clock, self.every = clock, every
        self.costs = Costs(machine, shape, op)
        self.num_actors = shape.num_ranks if every else 1
        self.ports = {name: [Port() for _ in range(self.num_actors)] for name in _PORTS}
        self.done = [0.0] * self.num_actors
        self.planned = [0.0] * self.num_actors
        self.is_dispatch = op == "dispatch"
        k = machine.kernels
        self.turn_us = k.dispatch_turn_us if self.is_dispatch else k.combine_turn_us
        self.fixed = k.dispatch_us if self.is_dispatch else k.combine_us
        self.fixed += k.member_us * math.log2(max(shape.domains))
        self.seen_us = protocol.passes * machine.pass_us / 2 if len(shape.domains) > 1 else 0.0
        self.tokens = protocol.windows(op, shape.tokens, new=plan != "cached")
        self.batches = 1 if self.is_dispatch else protocol.stream_batches
        self.num_windows = len(self.tokens) * self.batches
        chunk = protocol.chunk_rows[0 if self.is_dispatch else 1]
        counts = shape.counts
        tasks = counts.to_domain_SD.mean() / chunk * self.num_actors * (shape.num_ranks if every else 1)
        self.together = max(1, round(float(tasks) / _MOST_TASKS))  # chunks that go as one
        self.chunk_rows = self.together * chunk
        self.slots = -(-protocol.slots // self.together)
        self.streams = streams_of(shape, credits=self.slots, every=every)
        self.queue = self._queues()
        # By domain and window: members that have not ended it, and what waits for them.
        self.open = {
            (d, w): len(self.members(d)) for d in range(self.num_domains) for w in range(self.num_windows)
        }
        self.gates: dict[tuple[int, int], list[Callable[[], None]]] = defaultdict(list)
        self.chunks_of: Counter[tuple[int, int]] = Counter()  # by stream and window

    @property
    def num_domains(self) -> int:
        """Of those that actors stand for."""
        return len(self.shape.domains) if self.every else 1

    def domain_of(self, actor: int) -> int:
        return self.shape.topology.domain_of[actor] if self.every else 0

    def members(self, domain: int) -> range:
        """Actors of a domain."""
        first = self.shape.first_of
        return range(first[domain], first[domain + 1]) if self.every else range(1)

    def _queues(self) -> list[deque[Chunk]]:
        """What each actor produces, in order: of each window chunks of streams in turn, then granules of its
        own domain."""
        by: list[deque[Chunk]] = [deque() for _ in range(self.num_actors)]
        least = _TILE_TOKENS if self.is_dispatch else self.machine.num_sms * 32
        batches = in_batches(self.streams, self.batches, self.protocol.batch_streams)
        for window in range(self.num_windows):
            tokens = self.tokens[window // self.batches]
            share = tokens / self.shape.tokens
            granule = max(float(least), tokens * self.together / _MOST_GRANULES)
            left = {id(s): s.rows * share for s in self.streams}
            batch = batches[window % self.batches]
            away = [s for s in batch if not s.is_own]
            here = [s for s in batch if s.is_own]
            for group, most in ((away, self.chunk_rows), (here, granule)):
                group = [s for s in group if left[id(s)] > 1e-9]
                while group:
                    for s in group:
                        rows = min(most, left[id(s)])
                        left[id(s)] -= rows
                        actor = s.source if self.is_dispatch else s.rail
                        by[actor].append(Chunk(s, window, rows, rows / s.rows))
                    group = [s for s in group if left[id(s)] > 1e-9]
        return by

    def run(self, delays: Sequence[float]) -> Outcome:
        starts = [
            (delays[a] if len(delays) > 1 else delays[0]) + self.fixed / 2 for a in range(self.num_actors)
        ]
        new = self.plan != "cached" and self.is_dispatch
        k = self.machine.kernels
        if new:
            starts = [s + k.plan_us / 2 + 1e-3 * k.plan_token_ns * self.shape.tokens for s in starts]
        self.planned = self.exchange(starts, new=new)
        if new:
            self.planned = [p + k.plan_us / 2 for p in self.planned]
        # The call ends when the host has read the counts; rows do not wait for it.
        counted = self.machine.host_us if new and self.plan == "new" else 0.0
        self.done = [planned + counted for planned in self.planned]
        self.turns = self.turns_of()
        most = max(self.chunks_of.values(), default=0)
        if most > self.slots:  # credits come back when a window has ended, so it would never end
            raise InputError(
                f"slots = {self.protocol.slots}: allowed is at least {most}, the chunks of a window of "
                f"{max(self.tokens)} tokens"
            )
        for a, start in enumerate(starts):
            self.clock.at(start, lambda a=a: self.produce(a))  # type: ignore[misc]
        self.clock.run()
        if any(self.open.values()):
            raise RuntimeError(f"the model stands still: {self.open}")
        busy = {name: max(p.busy for p in ports) for name, ports in self.ports.items()}
        return Outcome(
            max(self.done) + self.fixed / 2, {n: b for n, b in busy.items() if b > 0}, self.num_windows
        )

    def exchange(self, starts: Sequence[float], *, new: bool) -> list[float]:
        """When each actor has the packets of all: headers, weights, routing."""
        others = len(self.shape.domains) - 1
        if others == 0 or not self.is_dispatch:
            return [max(starts)] * len(starts) if new else list(starts)
        size = self.shape.num_ranks / len(self.shape.domains)
        wire = self.costs.nic(others * packet_bytes(self.shape, round(size), self.shape.tokens, new))
        gone = []
        for a, start in enumerate(starts):
            posted = self.ports["proxy"][a].take(start, others * self.machine.post_us)
            gone.append(self.ports["nic out"][a].take(posted, wire))
        last = max(gone) + self.machine.wire_us + self.seen_us + (self.machine.kernels.hop_us if new else 0.0)
        return [last if new else start for start in starts]

    # ------------------------------------------------------------------------------- windows

    def turns_of(self) -> list[Turns]:
        """Of each actor: windows that it places, or what it merges. A combine relays window w before it
        merges its own tokens of w - 1, and those of the last window in the end. Windows without own tokens
        have a turn, too."""
        counts: list[Counter[int]] = [Counter() for _ in range(self.num_actors)]
        for queue in self.queue:
            for chunk in queue:
                stream = chunk.stream
                if not stream.is_own:
                    self.chunks_of[id(stream), self.own_window(chunk.window)] += 1
                if self.is_dispatch:
                    for part in stream.parts:
                        counts[part.actor][chunk.window] += 1
                else:
                    counts[stream.source][self.own_turn(self.own_window(chunk.window))] += 1
                    if not stream.is_own:
                        counts[stream.rail][2 * chunk.window] += 1
        turns = []
        for a, each in enumerate(counts):
            bare = [t for w in range(self.num_windows) if (t := self.own_turn(w)) not in each]
            each.update({} if self.is_dispatch else dict.fromkeys(bare, 1))
            turns.append(Turns(each, self.clock, lambda turn, a=a: self.end_turn(a, turn)))  # type: ignore[misc]
            if not self.is_dispatch:
                for turn in bare:
                    turns[a].add(turn, self.clock.now)
        return turns

    def own_window(self, window: int) -> int:
        """The one that merges the own tokens whose pieces and sums a window has."""
        return window - window % self.batches + self.batches - 1

    @staticmethod
    def own_turn(window: int) -> int:
        """Of a merge of own tokens; those of streams that are relayed have even numbers."""
        return 2 * (window + HALVES) - 1

    def end_turn(self, a: int, turn: int) -> float:
        """Gives the pause before the next turn."""
        self.done[a] = max(self.done[a], self.clock.now())
        if not self.is_dispatch and turn % 2 == 0:
            return 0.0
        window = turn if self.is_dispatch else (turn + 1) // 2 - HALVES
        domain = self.domain_of(a)
        self.open[domain, window] -= 1
        if self.open[domain, window] == 0:
            self.end_window(domain, window)
        return self.turn_us if self.is_dispatch else 0.0

    def end_window(self, domain: int, window: int) -> None:
        """All members of the domain have read what it held: its memory is free, and credits go back."""
        for go in self.gates.pop((domain, window), []):
            go()
        back = self.clock.now() + self.machine.wire_us + self.machine.post_us
        for stream in self.streams:
            to = self.domain_of(stream.rail if self.is_dispatch else stream.source)
            if not stream.is_own and to == domain:
                self.clock.at(back, lambda s=stream: self.credit(s, window))  # type: ignore[misc]

    def credit(self, stream: Stream, window: int) -> None:
        stream.credits += self.chunks_of[id(stream), window]
        while stream.waiting and stream.credits > 0:
            self.ship(stream.waiting.popleft())

    # ------------------------------------------------------------------------------- a chunk's way

    def produce(self, a: int) -> None:
        """Makes the actor's next chunk or granule, and comes back when it is made."""
        if not self.queue[a]:
            return
        chunk = self.queue[a][0]
        stream = chunk.stream
        before = (self.domain_of(a), chunk.window - HALVES)
        if self.open.get(before, 0) > 0:
            self.gates[before].append(lambda: self.produce(a))
            return
        if not stream.is_own and stream.made - stream.left >= self.slots:
            stream.blocked = lambda: self.produce(a)
            return
        self.queue[a].popleft()
        stream.made += 1
        made = self.stage(a, chunk) if self.is_dispatch else self.fold(chunk)
        ends = self.queue[a] and self.queue[a][0].window > chunk.window
        pause = self.turn_us if ends and not self.is_dispatch else 0.0
        self.clock.at(made + pause, lambda: self.produce(a))

    def stage(self, a: int, chunk: Chunk) -> float:
        begin = self.clock.now()
        if chunk.window > 0:
            begin = max(begin, self.planned[a])
        made = self.ports["stage"][a].take(begin, self.costs.stage(chunk.rows))
        self.clock.at(made, lambda: self.made(chunk))
        return made

    def fold(self, chunk: Chunk) -> float:
        now, stream, share = self.clock.now(), chunk.stream, chunk.share
        made = now
        for part in stream.parts:
            cost = self.costs.fold(part.pairs * share, part.rows * share)
            made = max(made, self.ports["fold"][part.actor].take(now, cost))
        remote = self.costs.link(share * sum(p.remote_rows for p in stream.parts))
        made = max(made, self.ports["nvlink"][stream.rail].take(now, remote))
        # Pieces are written; those of other ranks are seen later.
        met = made + (self.machine.kernels.relay_us if max(self.shape.domains) > 1 else 0.0)
        self.clock.at(met, lambda: self.met(chunk))
        return made

    def met(self, chunk: Chunk) -> None:
        stream = chunk.stream
        cost = self.costs.merge(chunk.share * sum(p.rows for p in stream.parts))

        def merge() -> float:
            merged = self.ports["merge"][stream.rail].take(self.clock.now(), cost)
            if not stream.is_own:
                self.clock.at(merged, lambda: self.made(chunk))
            return merged

        self.turns[stream.rail].add(self.own_turn(chunk.window) if stream.is_own else 2 * chunk.window, merge)

    def made(self, chunk: Chunk) -> None:
        """A chunk of rows or sums is complete at its producer."""
        if chunk.stream.is_own:
            self.place(chunk)
        else:
            self.clock.at(self.clock.now() + self.machine.kernels.hop_us, lambda: self.queued(chunk))

    def queued(self, chunk: Chunk) -> None:
        if chunk.stream.credits > 0:
            self.ship(chunk)
        else:
            chunk.stream.waiting.append(chunk)

    def ship(self, chunk: Chunk) -> None:
        stream = chunk.stream
        stream.credits -= 1
        sender, receiver = (stream.source, stream.rail) if self.is_dispatch else (stream.rail, stream.source)
        posted = self.ports["proxy"][sender].take(self.clock.now(), self.machine.post_us)
        sent = self.ports["nic out"][sender].take(posted, self.costs.nic(chunk.rows * self.costs.row))
        self.clock.at(sent + self.machine.wire_us, lambda: self.arrive(chunk, receiver))

    def arrive(self, chunk: Chunk, receiver: int) -> None:
        stream = chunk.stream
        stream.left += 1
        if stream.blocked:
            go, stream.blocked = stream.blocked, None
            go()
        # The NIC takes a chunk in while it comes, so the last byte is there when the first was, and its time.
        us = self.costs.nic(chunk.rows * self.costs.row)
        port = self.ports["nic in"][receiver]
        landed = max(self.clock.now(), port.free + us)
        port.free, port.busy = landed, port.busy + us
        self.clock.at(landed + self.seen_us, lambda: self.seen(chunk))

    def seen(self, chunk: Chunk) -> None:
        if self.is_dispatch:
            self.place(chunk)
            return
        port, cost = self.ports["merge"][chunk.stream.source], self.costs.merge(chunk.rows)
        turn = self.own_turn(self.own_window(chunk.window))
        self.turns[chunk.stream.source].add(turn, lambda: port.take(self.clock.now(), cost))

    def place(self, chunk: Chunk) -> None:
        """Every member pulls its rows over NVLink, and writes a row for each pair."""
        for part in chunk.stream.parts:
            self.turns[part.actor].add(chunk.window, lambda p=part: self.place_part(chunk, p))  # type: ignore[misc]

    def place_part(self, chunk: Chunk, part: Part) -> float:
        begin, share = max(self.clock.now(), self.planned[part.actor]), chunk.share
        pulled = self.ports["nvlink"][part.actor].take(begin, self.costs.link(part.remote_rows * share))
        cost = self.costs.place(part.pairs * share, part.remote_rows * share)
        return max(pulled, self.ports["place"][part.actor].take(begin, cost))


def simulate(
    machine: Machine,
    shape: Shape,
    protocol: Protocol,
    op: str,
    plan: str = "cached",
    *,
    delays_us: Sequence[float] | None = None,
    every: bool | None = None,
    clock: Clock | None = None,
) -> Outcome:
    """Predicts one operation, "dispatch" or "combine".

    plan       one of PLANS; a combine's is known
    delays_us  by how much each rank comes late, [R]; None: all come at once
    every      whether every rank is an actor; None: where load or delays differ

    Raises InputError.
    """
    if op not in ("dispatch", "combine") or plan not in PLANS:
        raise InputError(
            f"op = {op!r}, plan = {plan!r}: allowed is 'dispatch' | 'combine', and one of {PLANS}"
        )
    if delays_us is not None and (len(delays_us) != shape.num_ranks or min(delays_us) < 0):
        raise InputError(f"delays_us: allowed are {shape.num_ranks} times of at least 0, one for each rank")
    differ = not shape.is_even or delays_us is not None
    if every is False and differ:
        raise InputError("every = False: one rank stands for all only under uniform load without delays")
    return _Operation(
        machine,
        shape,
        protocol,
        op,
        plan,
        every=differ if every is None else every,
        clock=clock or SimulatedClock(),
    ).run(delays_us if delays_us is not None else [0.0])
