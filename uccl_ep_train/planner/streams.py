"""Streams of rows from a rank to a domain, in the order in which ranks produce them."""

from __future__ import annotations

from collections import Counter

from uccl_ep_train.planner.ports import Part, Stream
from uccl_ep_train.planner.shape import Shape


def streams_of(shape: Shape, *, credits: int, every: bool) -> list[Stream]:
    """every: all ranks are actors, else one stands for all.

    Own domains come last: others wait for what crosses the network.
    """
    counts = shape.counts
    num_actors = shape.num_ranks if every else 1
    found: list[Stream] = []
    own: list[Stream] = []
    # In turns: at no time do all senders write to one receiver.
    for step in range(1, len(shape.domains) + 1):
        for source in range(num_actors):
            of = counts.of(source)
            home = shape.topology.domain_of[source]
            d = (home + step) % len(shape.domains)
            first, size = shape.first_of[d], shape.domains[d]
            rail = source if d == home else shape.topology.rail(source, d)
            rows, pairs = counts.to_rank_SR[of], counts.pairs_SR[of]
            members = range(first, first + size)
            if every:
                parts = [
                    Part(q, float(rows[q]), float(pairs[q]), float(rows[q]) * (q != rail)) for q in members
                ]
            else:
                # By symmetry this actor gets from all rails what all members get from its own.
                total = float(rows[first : first + size].sum())
                parts = [Part(0, total, float(pairs[first : first + size].sum()), total * (size - 1) / size)]
                rail = 0
            stream_rows = shape.tokens if d == home else float(counts.to_domain_SD[of, d])
            stream = Stream(source, rail, stream_rows, parts, d == home, credits=credits)
            # By symmetry the rails of a source take it in all turns, as rails take their sources.
            stream.number = len(shape.domains) - 1 - step
            (own if d == home else found).append(stream)
    if every:
        turns: Counter[int] = Counter()
        for stream in sorted(found, key=lambda s: (s.source - s.rail) % shape.num_ranks):
            stream.number = turns[stream.rail]
            turns[stream.rail] += 1
    return found + own


def in_batches(streams: list[Stream], num_batches: int, batch_streams: int) -> list[list[Stream]]:
    """Of a combine, by batch of the rail; own tokens are in the last one."""
    found: list[list[Stream]] = [[] for _ in range(num_batches)]
    for stream in streams:
        is_last = num_batches == 1 or stream.is_own
        found[-1 if is_last else min(stream.number // batch_streams, num_batches - 1)].append(stream)
    return found
