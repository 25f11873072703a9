"""Mutants that groups of many ranks or domains find, or simulated time: see mutants.py."""

from __future__ import annotations

MANY_DOMAINS = "a map whose tokens reach more than 32 other domains has the host's bits"
IN_BATCHES = "streams in batches have the host's bits, in windows of 11 domains of 2"
OF_600_RANKS = "a domain of 600 ranks gets the rows of all, and every sum"
MANY_RANKS = "low latency has more ranks than a word has bits, and more domains than a warp has lanes"
LONGER_WINDOWS = "where a domain gets few rows, later windows of a dispatch are longer, with the host's bits"
RANK_MUTANTS = {
    "windows are as long as what is staged at once, whatever the rings hold": (
        LONGER_WINDOWS, "windows.h", "return (fit < most ? fit : most) * length;",
        "return (fit < most ? most : most) * length;",
    ),
    "of a known plan, later windows are as long as the first of a new one": (
        LONGER_WINDOWS, "windows.h", "return tokens < least ? least : tokens;",
        "return tokens < least ? tokens : least;",
    ),
    "the second window of a new plan begins where a later one does": (
        LONGER_WINDOWS, "windows.h", "window == 1 ? first : (window - 1) * each;", "window * each;",
    ),
    "only the domains of a warp's lanes get rows": (
        MANY_RANKS, "low_latency_dispatch.cu", "first < g.map.num_domains; first += kWarp",
        "first < kWarp; first += kWarp",
    ),
    "ranks beyond a warp's lanes have the slots of those before": (
        MANY_RANKS, "low_latency_place.cuh", "before = by_warps ? __shfl_sync(kFullWarp, end, kWarp - 1)",
        "before = by_warps ? 0",
    ),
    "a row is written to the first rings only": (
        MANY_DOMAINS, "stage.cuh", "left = found - skipped - outs.num_places;", "left = 0;",
    ),
    "a chunk of a domain beyond a warp's lanes is pushed again": (
        MANY_DOMAINS, "net.cuh", "out.chunk = pushed[i].window;", "out.chunk = 0;",
    ),
    "all streams are in the first batch": (
        IN_BATCHES, "fold.cuh", "return last == 0 || stream == 0 ? last :", "return stream == 0 ? last : 0 *",
    ),
    "streams of all batches have the pieces of the first": (
        IN_BATCHES, "merge.cuh", "piece_place(k.g, stream) * k.g.map", "stream * k.g.map",
    ),
    "ranks beyond 255 are those of a byte": (
        OF_600_RANKS, "group.h", "return entries[i]; }", "return entries[i % 256]; }",
    ),
    "a source beyond the lanes of a warp has the rows of another": (
        "65 ranks in 8 domains of 8 and one of 1 have the host's bits", "sources.cuh",
        "out_row = __shfl_sync(kFullWarp, end, kWarp - 1);", "out_row = first_row;",
    ),
}  # fmt: skip

TIME_MUTANTS = {
    "a rank that does not arrive has four times as long": (
        "a rank that never calls is named by all others after the arrival deadline of 300 s",
        "patience.cuh", "is_arrival ? g.arrival_nsec", "is_arrival ? 4 * g.arrival_nsec",
    ),
}  # fmt: skip
