"""Who waits in a creation learns at once that another rank has left it, by its death or not."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.unit.by_hand import SETTINGS, outcome, together
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import ArrivalTimeout, PeerDied, PeerFailed, TransportError
from uccl_ep_train.group import lifecycle
from uccl_ep_train.group.bootstrap import StoreBootstrap, exchange
from uccl_ep_train.group.presence import Presence, meet

AT_ONCE_S = 5.0
"""Far below the deadline of these bootstraps, whatever else the machine does."""


class Known:
    """A process as one rank sees it."""

    host = host_key = "node7"

    def __init__(self, *, ended: bool = False) -> None:
        self.ended = ended

    def has_ended(self) -> bool:
        return self.ended

    def __str__(self) -> str:
        return "on node7 (pid 4711)"


def bootstraps(size: int, store: Any = None, timeout_s: float = 60.0) -> list[StoreBootstrap]:
    store = store or dist.HashStore()
    return [StoreBootstrap(store, rank, size, name="test", timeout_s=timeout_s) for rank in range(size)]


def gather(entry: StoreBootstrap) -> Any:
    return outcome(lambda: entry.all_gather(b"", "allocate"))


def test_a_rank_of_the_dead_ones_host_tells_those_of_other_hosts() -> None:
    near, far, _ = bootstraps(3)
    near.watch([Known(), Known(), Known(ended=True)])
    far.watch([Known(), Known(), Known()])  # it cannot look there
    started = time.monotonic()
    for error in together([lambda: gather(near), lambda: gather(far)]):
        assert isinstance(error, PeerDied) and error.peer == 2
        assert str(error) == (
            "creation, allocate: rank 2 on node7 (pid 4711) died; see its log, and dmesg on node7 "
            "(the out-of-memory killer)"
        )
    assert time.monotonic() - started < AT_ONCE_S


def test_where_nobody_can_look_the_deadline_remains_and_names_the_host() -> None:
    """Control of the test above, too: nothing else ends the wait."""
    ranks = bootstraps(3, timeout_s=0.8)
    for entry in ranks:
        entry.watch([Known()] * 3)
    for error in together([lambda: gather(ranks[0]), lambda: gather(ranks[1])]):
        assert isinstance(error, ArrivalTimeout)
        assert str(error).startswith("look first at rank 2 on node7 (pid 4711): creation, allocate: rank ")


def test_a_rank_that_has_done_its_part_may_end() -> None:
    """It posted what the others wait for between two looks of the other."""
    first, second = bootstraps(2)
    last = threading.Thread(target=lambda: second.all_gather(b"", "allocate"))

    class Leaving(Known):
        def has_ended(self) -> bool:
            if not last.ident:
                last.start()
                while first._tree.late_ranks() == [1]:
                    time.sleep(0.01)
            return True

    first.watch([Known(), Leaving()])
    assert gather(first) == [b"", b""]
    assert last.ident, "nobody looked"
    last.join()


def test_a_rank_that_gives_up_says_so() -> None:
    first, second = bootstraps(2)

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exchange(second, "allocate", interrupted)
    started = time.monotonic()
    error = gather(first)
    assert isinstance(error, PeerFailed) and error.peer == 1
    assert str(error) == "creation, allocate: rank 1 gave up by KeyboardInterrupt: "
    assert time.monotonic() - started < AT_ONCE_S


def test_a_rank_that_gives_up_between_two_steps_of_a_creation_says_so_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while it waits for nobody: the others waited for the deadline."""
    first, second = bootstraps(2)
    check, here = lifecycle.transport.check_domains, threading.get_ident()

    def interrupted(*given: Any) -> None:
        if threading.get_ident() == here:
            raise KeyboardInterrupt
        check(*given)

    monkeypatch.setattr(lifecycle.transport, "check_domains", interrupted)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(outcome, lambda: Buffer(None, EpConfig(**SETTINGS), bootstrap=first))
        with pytest.raises(KeyboardInterrupt):
            Buffer(None, EpConfig(**SETTINGS), bootstrap=second)
        error = other.result()
    assert isinstance(error, PeerFailed) and error.peer == 1
    assert "rank 1 gave up by KeyboardInterrupt" in str(error)
    assert time.monotonic() - started < AT_ONCE_S


@pytest.mark.parametrize(
    ("own", "seen"),
    [(TransportError("opening memory: no such file"), PeerFailed), (ValueError("x"), ValueError)],
)
def test_what_a_rank_took_along_is_not_the_cause(own: Exception, seen: type[Exception]) -> None:
    """Control: another failure of a rank's own is its error still."""
    first, second = bootstraps(2)

    def fail(error: BaseException) -> bytes:
        raise error

    with pytest.raises(KeyboardInterrupt):
        exchange(second, "connect", lambda: fail(KeyboardInterrupt()))
    assert type(outcome(lambda: exchange(first, "connect", lambda: fail(own)))) is seen


def test_the_first_that_ran_out_of_patience_names_the_cause_for_all() -> None:
    store = dist.HashStore()
    hasty = StoreBootstrap(store, 0, 3, name="test", timeout_s=0.3)
    patient = StoreBootstrap(store, 1, 3, name="test", timeout_s=60.0)
    for error in together([lambda: gather(hasty), lambda: gather(patient)]):
        assert isinstance(error, ArrivalTimeout) and error.peer == 2
        assert "rank 0 waited 0.3 s for rank 2 of 3" in str(error)


class Gone:
    """A store that goes after so many calls."""

    def __init__(self, calls: int) -> None:
        self._store, self._left = dist.HashStore(), calls

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OSError("connection reset by peer")
        return getattr(self._store, name)


@pytest.mark.parametrize("dead", [True, False])
def test_a_store_that_goes_with_the_rank_that_served_it(dead: bool) -> None:
    entry = StoreBootstrap(Gone(20), 0, 2, name="test", timeout_s=60.0)  # type: ignore[arg-type]
    entry.watch([Known(), Known(ended=dead)])
    error = gather(entry)
    assert isinstance(error, PeerDied if dead else TransportError)
    assert "died" in str(error) if dead else "connection reset by peer" in str(error)


def test_what_a_stranger_wrote_is_an_error_and_no_crash() -> None:
    store = dist.HashStore()
    first = bootstraps(2, store)[0]
    store.set(f"{first._prefix}/end", b"\xff{")
    error = gather(first)
    assert isinstance(error, PeerFailed) and "gave up" in str(error)


def test_ranks_learn_where_the_others_run() -> None:
    here = Presence.here()
    for ranks, _ in together([lambda entry=entry: meet(entry) for entry in bootstraps(2)]):
        assert [*ranks] == [here, here] and [*ranks[1:]] == [here]
        assert here.pid == os.getpid() and here.host == os.uname().nodename
        assert str(ranks[1]) == f"on {here.host} (pid {here.pid})"
