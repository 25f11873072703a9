"""A creation asks little of the store, takes nothing from it that is not its own, and names who is late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store_ranks import RANKS_OF_A_HOST, STEPS, FlatTree, Server, create, create_in_processes
from tests.unit.by_hand import outcome, together
from uccl_ep_train.errors import ArrivalTimeout, PeerFailed, RankMismatchError, TransportError
from uccl_ep_train.group.bootstrap import StoreBootstrap
from uccl_ep_train.group.store_tree import StoreTree, consecutive, pack, unpack

RANKS = 64
MOST_STORE_S = 5.0
"""Of the store's processor time, for a creation of 256 ranks."""


def most_keys_read(ranks: int) -> int:
    """One with all frames, at each rank; frames at leaders; bundles at rank 0; nonces."""
    return STEPS * (2 * ranks + max(ranks // RANKS_OF_A_HOST, len(consecutive(ranks)))) + ranks


@pytest.mark.parametrize("tree", [StoreTree, FlatTree])
def test_each_rank_reads_a_few_keys_in_each_step(tree: type[StoreTree]) -> None:
    """Control: where each reads the frame of each, the same count is beyond the bound."""
    with Server() as server:
        asked = create(server.port, range(RANKS), RANKS, tree)
    assert (asked["keys read"] <= most_keys_read(RANKS)) == (tree is StoreTree), asked
    # A frame, and a bundle of each leader; the nonce.
    assert asked["set"] <= STEPS * (RANKS + RANKS // 4) + 1
    assert asked["get"] + asked["multi_get"] <= STEPS * (RANKS + RANKS // 4) + RANKS


@pytest.mark.slow
def test_a_creation_of_256_ranks_takes_seconds_of_the_store() -> None:
    with Server() as server:
        before = server.cpu_s()
        asked = create_in_processes(server.port, 4, 256, StoreTree)
        assert server.cpu_s() - before <= MOST_STORE_S
    assert asked["keys read"] <= most_keys_read(256)


def bootstraps(
    store: Any, size: int, ranks: list[int] | None = None, timeout_s: float = 20.0
) -> list[StoreBootstrap]:
    return [
        StoreBootstrap(store, rank, size, name="g", timeout_s=timeout_s)
        for rank in (range(size) if ranks is None else ranks)
    ]


def gather(entry: StoreBootstrap, payload: bytes = b"") -> Any:
    return outcome(lambda: entry.all_gather(payload, "allocate"))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9, 10, 17])
def test_sections_of_any_number_of_ranks(size: int) -> None:
    sections = consecutive(size)
    assert [rank for section in sections for rank in section] == list(range(size))
    assert max(map(len, sections)) <= 1 + size**0.5 and len(sections) <= 1 + size**0.5
    ranks = bootstraps(dist.HashStore(), size)
    payloads = [bytes([rank]) * rank for rank in range(size)]
    calls: list[Callable[[], Any]] = [
        lambda entry=entry: gather(entry, payloads[entry.rank]) for entry in ranks
    ]
    for _ in range(2):
        assert together(calls) == [payloads] * size


@pytest.mark.parametrize(
    ("absent", "named"), [([1], "rank 1 of 9"), ([3], "rank 3 of 9"), ([2, 8], "ranks 2, 8 of 9")]
)
def test_who_is_late_is_named_member_or_leader(absent: list[int], named: str) -> None:
    ranks = bootstraps(dist.HashStore(), 9, [rank for rank in range(9) if rank not in absent], 0.5)
    for error in together([lambda entry=entry: gather(entry) for entry in ranks]):
        assert isinstance(error, ArrivalTimeout) and error.peer == absent[0] and named in str(error)


def test_a_leader_that_posts_its_frame_and_no_bundle_is_named() -> None:
    ranks = bootstraps(dist.HashStore(), 9, timeout_s=0.5)
    stuck = ranks.pop(3)
    assert stuck._try_join()
    stuck._tree.post(0, b"allocate\0")
    for error in together([lambda entry=entry: gather(entry) for entry in ranks]):
        assert isinstance(error, ArrivalTimeout) and error.peer == 3 and "rank 3 of 9" in str(error)


def test_a_missing_rank_0_is_named() -> None:
    for error in together(
        [lambda entry=entry: gather(entry) for entry in bootstraps(dist.HashStore(), 3, [1, 2], 0.5)]
    ):
        assert isinstance(error, ArrivalTimeout) and error.peer == 0 and "rank 0 of 3" in str(error)


def test_frames_of_an_earlier_job_are_not_read() -> None:
    """It died when its ranks had posted, and the store has lost count of it."""
    store = dist.HashStore()
    old = bootstraps(store, 2)
    assert together([lambda: gather(old[0], b"old"), lambda: gather(old[1], b"old")]) == [[b"old"] * 2] * 2
    for rank in range(2):
        store.delete_key(f"uccl_ep_train/g/creations/{rank}")
    first, second = bootstraps(store, 2)
    assert first._prefix != old[0]._prefix
    assert together([lambda: gather(first, b"new"), lambda: gather(second, b"new")]) == [[b"new"] * 2] * 2


def test_a_rank_that_is_shown_an_earlier_creation_says_so() -> None:
    """Only it counts from the start again, so it finds the nonce of a creation that was complete."""
    store = dist.HashStore()
    old = bootstraps(store, 2)
    together([lambda entry=entry: gather(entry, b"old") for entry in old])
    store.delete_key("uccl_ep_train/g/creations/1")
    error = gather(bootstraps(store, 2, [1])[0], b"old")
    assert isinstance(error, RankMismatchError) and error.peer == 0
    assert "rank 1 has no part in the creation that the store shows it" in str(error)


def in_place_of(store: Any, part: str, value: bytes) -> Any:
    """The store, with `value` in place of what is set under keys with this part."""

    class Forging:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def set(self, key: str, said: bytes) -> None:
            store.set(key, value if part in key else said)

    return Forging()


PARTS = {"/frame/1": 1, "/bundle/2": 2, "/all": 0, "/nonce": 0}


@pytest.mark.parametrize("part", PARTS)
@settings(max_examples=10, deadline=None)
@given(value=st.binary(max_size=64) | st.integers(0, 40).map(lambda cut: pack([b"x" * 30, b"y" * 30])[:cut]))
def test_whatever_a_stranger_puts_in_place_is_a_typed_error_on_all_that_read_it(
    part: str, value: bytes
) -> None:
    store = dist.HashStore()
    forged = in_place_of(store, part, value)
    ranks = [StoreBootstrap(forged, rank, 4, name="g", timeout_s=0.4) for rank in range(4)]
    errors = together([lambda entry=entry: gather(entry) for entry in ranks])
    # Rank 0 posts "/all" and does not read it.
    for error in errors[1:] if part == "/all" else errors:
        assert isinstance(error, TransportError | RankMismatchError | PeerFailed | ArrivalTimeout), error


def test_without_a_stranger_the_same_ranks_meet() -> None:
    """Control of the test above."""
    ranks = bootstraps(in_place_of(dist.HashStore(), "nowhere", b""), 4)
    assert together([lambda entry=entry: gather(entry) for entry in ranks]) == [[b""] * 4] * 4


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 7))
def test_what_is_packed_is_unpacked_and_nothing_else_is(frames: list[bytes], number: int) -> None:
    packed = pack(frames)
    assert unpack(packed, len(frames)) == frames
    if number != len(frames):
        with pytest.raises(ValueError):
            unpack(packed, number)
    for wrong in (packed[:-1], packed + b"\0"):
        with pytest.raises(ValueError):
            unpack(wrong, len(frames))


@given(st.binary(max_size=200), st.integers(0, 20))
def test_foreign_bytes_are_unpacked_whole_or_refused(packed: bytes, number: int) -> None:
    try:
        frames = unpack(packed, number)
    except ValueError:
        return
    assert pack(frames) == packed


def test_a_wait_ends_when_what_it_waits_for_comes() -> None:
    """A pause grows with the group, and no rank is late by more than one."""
    first, second = bootstraps(dist.HashStore(), 2)
    late = threading.Timer(0.3, lambda: gather(second))
    late.start()
    assert gather(first) == [b"", b""]
    late.join()
