"""The event model of one operation: chunks that wait for ports, credits, windows and flags.

A *port* does one thing at a time: the SMs that stage, place, fold or merge; a rank's NVLink (in); its NIC,
out and in; its proxy. A chunk passes stage, proxy, NIC, wire, NIC, the poller that sees it, NVLink and SMs.

Under uniform load one actor stands for all: what arrives at it is, by symmetry, what it sends. Otherwise
every
rank is an actor. Not modelled: congestion inside the network, loss, queue-pair caches, HBM, low latency.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from uccl_ep_train.errors import InputError
from uccl_ep_train.planner.clock import Clock, SimulatedClock
from uccl_ep_train.planner.machine import Machine
from uccl_ep_train.planner.protocol import Protocol
from uccl_ep_train.planner.shape import Shape

PLANS = ("cached", "sync_free", "new")
"""A known plan; a new one whose counts stay on the GPU; a new one whose counts the host reads."""
_VALUE_BYTES = 4  # a router weight of a pair
_TILE_TOKENS = 64  # routed and staged together
_MOST_GRANULES = 64  # that the own domain's tokens are cut into
_PORTS = ("stage", "proxy", "nic out", "nic in", "nvlink", "place", "fold", "merge")


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
class _Part:
    """What an actor gets (dispatch) or gives (combine) of a stream."""

    actor: int
    rows: float
    pairs: float
    remote_rows: float  # that cross NVLink


@dataclass
class _Stream:
    """Rows of `source` for one domain. At `rail` they enter it; of the own domain: the source itself."""

    source: int
    rail: int
    rows: float
    parts: list[_Part]
    pairs: float = 0.0
    waiting: deque[float] = field(default_factory=deque)  # rows of chunks without a credit
    flying: int = 0


class _Costs:
    """Microseconds of the SMs and ports for rows of one shape."""

    def __init__(self, machine: Machine, shape: Shape, op: str) -> None:
        k, self.scale = machine.kernels, 24e-3 / machine.num_sms  # from ns of 24 SMs to us
        self.machine, self.kernels = machine, k
        wire = shape.dtype if op == "dispatch" else "bf16"
        self.row = float(shape.row_bytes(wire))
        self.input_row = 2.0 * shape.hidden
        expands = shape.dtype == "fp8" and not shape.codes
        out_kb = (shape.row_bytes("fp8") if shape.codes else 2 * shape.hidden) / 1e3
        self.pair_ns = out_kb * (k.expand_ns if expands else k.place_ns)
        self.pair_ns += k.expand_row_ns if expands else k.codes_ns if shape.codes else 0.0
        # Segments of 3584 bytes where whole ones fill a row, else of 2048: csrc/backend/gpu/sum_bulk.cuh.
        segment = 3584 if self.input_row % 3584 == 0 else 2048
        self.steps = math.ceil(self.input_row / segment)
        self.step_ns = k.step_ns + k.step_byte_ns * segment / 1e3

        several = len(shape.domains) > 1
        self.stage_ns = self.input_row / 1e3 * (machine.stage_several_ns if several else machine.stage_ns)
        self.tokens_of_row = shape.tokens / max(1.0, float(shape.counts.to_domain_SD.sum(1).mean()))

    def stage(self, rows: float) -> float:
        """Of the tokens behind rows for one domain: a token is read once for all its domains."""
        return rows * self.tokens_of_row * self.stage_ns * self.scale

    def place(self, pairs: float, remote_rows: float) -> float:
        return (pairs * self.pair_ns + remote_rows * self.row / 1e3 * self.kernels.pull_ns) * self.scale

    def fold(self, pairs: float, rows: float) -> float:
        """Adds each pair's row, and writes a piece for each row."""
        return (pairs + rows) * self.steps * self.step_ns * self.scale

    def merge(self, pieces: float) -> float:
        return pieces * self.steps * self.kernels.merge_ns * self.scale

    def link(self, rows: float) -> float:
        return rows * self.row / (self.machine.link_gbps * self.kernels.link_share) * 1e-3

    def nic(self, num_bytes: float) -> float:
        return num_bytes / self.machine.nic_gbps * 1e-3


def packet_bytes(shape: Shape, domain_size: int, tokens: int, new_plan: bool) -> float:
    """Of the header, weights and, with a new plan, routing that a rank sends to a domain, on average.
    csrc/backend/gpu/packet.h."""
    pairs = tokens * shape.router.topk * domain_size / shape.num_ranks
    weights = 64 + _VALUE_BYTES * pairs
    if not new_plan:
        return weights
    counts = shape.counts
    rows = float(counts.to_rank_SR.mean()) * domain_size * tokens / shape.tokens
    stream = float(counts.to_domain_SD.mean()) * tokens / shape.tokens
    blocks = tokens / 32 + 1
    each = shape.router.num_experts / shape.num_ranks
    tables = 4 * domain_size * each + 8 * (domain_size + 1) + 4 * (domain_size + 2) * blocks
    return weights + tables + 16 * rows + 8 * pairs + 4 * (stream + 1)


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
        self.costs = _Costs(machine, shape, op)
        self.num_actors = shape.num_ranks if every else 1
        self.ports = {name: [Port() for _ in range(self.num_actors)] for name in _PORTS}
        self.ready = [0.0] * self.num_actors
        self.done = [0.0] * self.num_actors
        self.planned = [0.0] * self.num_actors
        self.is_dispatch = op == "dispatch"
        k = machine.kernels
        self.fixed = k.dispatch_us if self.is_dispatch else k.combine_us
        self.fixed += k.member_us * math.log2(max(shape.domains))
        self.seen_us = protocol.passes * machine.pass_us / 2 if len(shape.domains) > 1 else 0.0

    def streams(self, share: float) -> list[_Stream]:
        """Of a window with so much of the tokens. Own domains come last: others wait for what crosses the
        network."""
        shape, counts = self.shape, self.shape.counts
        found: list[_Stream] = []
        own: list[_Stream] = []
        # In turns: at no time do all senders write to one receiver.
        for step in range(1, len(shape.domains) + 1):
            for source in range(self.num_actors):
                of = counts.of(source)
                home = shape.topology.domain_of[source]
                d = (home + step) % len(shape.domains)
                first, size = shape.first_of[d], shape.domains[d]
                rail = source if d == home else shape.topology.rail(source, d)
                rows, pairs = share * counts.to_rank_SR[of], share * counts.pairs_SR[of]
                members = range(first, first + size)
                if self.every:
                    parts = [
                        _Part(q, float(rows[q]), float(pairs[q]), float(rows[q]) * (q != rail))
                        for q in members
                    ]
                else:
                    # By symmetry this actor gets from all rails what all members get from its own.
                    total = float(rows[first : first + size].sum())
                    parts = [
                        _Part(0, total, float(pairs[first : first + size].sum()), total * (size - 1) / size)
                    ]
                    rail = 0
                stream_rows = share * (shape.tokens if d == home else float(counts.to_domain_SD[of, d]))
                stream = _Stream(source, rail, stream_rows, parts, sum(p.pairs for p in parts))
                (own if d == home else found).append(stream)
        return found + own

    def is_own(self, stream: _Stream) -> bool:
        return stream is self.own[stream.source]

    def run(self, delays: Sequence[float]) -> Outcome:
        tokens = self.protocol.windows(self.op, self.shape.tokens)
        for a in range(self.num_actors):
            self.ready[a] = delays[a] if len(delays) > 1 else delays[0]
        for number, window in enumerate(tokens):
            self.window(window, first=number == 0, last=number == len(tokens) - 1)
        busy = {name: max(p.busy for p in ports) for name, ports in self.ports.items()}
        return Outcome(max(self.ready), {n: b for n, b in busy.items() if b > 0}, len(tokens))

    def window(self, tokens: int, *, first: bool, last: bool) -> None:
        """The kernel's fixed time comes before the first window and after the last."""
        streams = self.streams(tokens / self.shape.tokens)
        self.own = {s.source: s for s in streams[len(streams) - self.num_actors :]}
        starts = [ready + self.fixed / 2 * first for ready in self.ready]
        new = self.plan != "cached" and first and self.is_dispatch
        k = self.machine.kernels
        if new:
            starts = [s + k.plan_us / 2 + 1e-3 * k.plan_token_ns * tokens for s in starts]
        self.planned = self.exchange(starts, tokens, new=new)
        if new:
            self.planned = [p + k.plan_us / 2 for p in self.planned]
        # The call ends when the host has read the counts; rows do not wait for it.
        counted = k.host_us if new and self.plan == "new" else 0.0
        self.done = [planned + counted for planned in self.planned]
        self.next_of: dict[int, deque[tuple[_Stream, float]]] = {}
        for a, queue in self.queues(streams, tokens).items():
            self.next_of[a] = queue
            self.clock.at(starts[a], lambda a=a: self.produce(a))  # type: ignore[misc]
        self.clock.run()
        self.ready = [done + self.fixed / 2 * last for done in self.done]

    def exchange(self, starts: Sequence[float], tokens: int, *, new: bool) -> list[float]:
        """When each actor has the packets of all: headers, weights, routing."""
        others = len(self.shape.domains) - 1
        if others == 0 or not self.is_dispatch:
            return [max(starts)] * len(starts) if new else list(starts)
        size = self.shape.num_ranks / len(self.shape.domains)
        wire = self.costs.nic(others * packet_bytes(self.shape, round(size), tokens, new))
        gone = []
        for a, start in enumerate(starts):
            posted = self.ports["proxy"][a].take(start, others * self.machine.post_us)
            gone.append(self.ports["nic out"][a].take(posted, wire))
        last = max(gone) + self.machine.wire_us + self.seen_us + (self.machine.kernels.hop_us if new else 0.0)
        return [last if new else start for start in starts]

    def queues(self, streams: Sequence[_Stream], tokens: int) -> dict[int, deque[tuple[_Stream, float]]]:
        """What each actor produces, in order: chunks of streams in turn, then granules of its own domain."""
        chunk = self.protocol.chunk_rows[0 if self.is_dispatch else 1]
        least = _TILE_TOKENS if self.is_dispatch else self.machine.num_sms * 32
        granule = max(float(least), tokens / _MOST_GRANULES)
        by: dict[int, deque[tuple[_Stream, float]]] = {a: deque() for a in range(self.num_actors)}
        left = {id(s): s.rows for s in streams}
        away = [s for s in streams if not self.is_own(s)]
        here = [s for s in streams if self.is_own(s)]
        for group, most in ((away, chunk), (here, granule)):
            while group:
                for s in group:
                    rows = min(most, left[id(s)])
                    left[id(s)] -= rows
                    by[s.source if self.is_dispatch else s.rail].append((s, rows))
                group = [s for s in group if left[id(s)] > 1e-9]
        return by

    # ------------------------------------------------------------------------------- a chunk's way

    def produce(self, a: int) -> None:
        """Makes the actor's next chunk or granule, and comes back when it is made."""
        if not self.next_of[a]:
            return
        stream, rows = self.next_of[a].popleft()
        now = self.clock.now()
        if self.is_dispatch:
            made = self.ports["stage"][a].take(now, self.costs.stage(rows))
            self.clock.at(made, lambda: self.made(stream, rows))
        else:
            share = rows / stream.rows if stream.rows else 0.0
            made = now
            for part in stream.parts:
                folded = self.ports["fold"][part.actor].take(
                    now, self.costs.fold(part.pairs * share, part.rows * share)
                )
                made = max(made, folded)
            linked = self.ports["nvlink"][stream.rail].take(
                now, self.costs.link(share * sum(p.remote_rows for p in stream.parts))
            )
            made = max(made, linked)
            pieces = share * sum(p.rows for p in stream.parts)
            self.clock.at(made, lambda: self.folded(stream, rows, pieces))
        self.clock.at(made, lambda: self.produce(a))

    def folded(self, stream: _Stream, rows: float, pieces: float) -> None:
        """Pieces are written; those of other ranks are seen later."""
        met = self.clock.now() + (self.machine.kernels.relay_us if max(self.shape.domains) > 1 else 0.0)
        self.clock.at(met, lambda: self.met(stream, rows, pieces))

    def met(self, stream: _Stream, rows: float, pieces: float) -> None:
        merged = self.ports["merge"][stream.rail].take(self.clock.now(), self.costs.merge(pieces))
        if self.is_own(stream):
            self.done[stream.source] = max(self.done[stream.source], merged)
        else:
            self.clock.at(merged, lambda: self.made(stream, rows))

    def made(self, stream: _Stream, rows: float) -> None:
        """A chunk of rows or sums is complete at its producer."""
        if self.is_own(stream):
            self.place(stream, rows, self.clock.now())
        elif stream.flying < self.protocol.slots:
            self.ship(stream, rows)
        else:
            stream.waiting.append(rows)

    def ship(self, stream: _Stream, rows: float) -> None:
        stream.flying += 1
        sender, receiver = (stream.source, stream.rail) if self.is_dispatch else (stream.rail, stream.source)
        posted = self.ports["proxy"][sender].take(self.clock.now(), self.machine.post_us)
        sent = self.ports["nic out"][sender].take(posted, self.costs.nic(rows * self.costs.row))
        self.clock.at(sent + self.machine.wire_us, lambda: self.arrive(stream, rows, receiver))

    def arrive(self, stream: _Stream, rows: float, receiver: int) -> None:
        # The NIC takes a chunk in while it comes, so the last byte is there when the first was, and its time.
        us = self.costs.nic(rows * self.costs.row)
        port = self.ports["nic in"][receiver]
        landed = max(self.clock.now(), port.free + us)
        port.free, port.busy = landed, port.busy + us
        seen = landed + self.seen_us + self.machine.kernels.hop_us
        self.clock.at(seen, lambda: self.seen(stream, rows))

    def seen(self, stream: _Stream, rows: float) -> None:
        if self.is_dispatch:
            last = self.place(stream, rows, self.clock.now())
        else:
            last = self.ports["merge"][stream.source].take(self.clock.now(), self.costs.merge(rows))
            self.done[stream.source] = max(self.done[stream.source], last)
        self.clock.at(last + self.machine.wire_us + self.machine.post_us, lambda: self.credit(stream))

    def credit(self, stream: _Stream) -> None:
        stream.flying -= 1
        if stream.waiting:
            self.ship(stream, stream.waiting.popleft())

    def place(self, stream: _Stream, rows: float, now: float) -> float:
        """Every member pulls its rows over NVLink, and writes a row for each pair."""
        share = rows / stream.rows if stream.rows else 0.0
        last = now
        for part in stream.parts:
            begin = max(now, self.planned[part.actor])
            pulled = self.ports["nvlink"][part.actor].take(begin, self.costs.link(part.remote_rows * share))
            cost = self.costs.place(part.pairs * share, part.remote_rows * share)
            end = max(pulled, self.ports["place"][part.actor].take(begin, cost))
            self.done[part.actor] = max(self.done[part.actor], end)
            last = max(last, end)
        return last


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
