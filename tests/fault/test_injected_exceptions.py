"""An exception that another thread injects into one that waits in native code (PyThreadState_SetAsyncExc)."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError
from uccl_ep_train.group.bootstrap import TorchBootstrap

pytestmark = pytest.mark.fault

DOMAINS = (0, 0, 1, 1)
T, H, K, E = 30, 128, 2, 8
ABSENT = 2
SOON_S = 1.0  # the deadlines are a minute


class Injected(BaseException):
    """What a monitor of the program raises in its main thread."""


def inject(thread: int) -> float:
    at = time.monotonic()
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Injected)) == 1
    return at


def wait_for_what_does_not_come(rank: Rank, where: str, injects: bool) -> Any:
    """What ended the wait, how long that took from the injection on, and what is mapped afterwards."""
    config = EpConfig(
        num_experts=E, hidden=H, domains=DOMAINS, budget_bytes=4 << 20, dispatch_dtype="bf16",
        arrival_timeout_s=60.0, progress_timeout_s=60.0,
    )  # fmt: skip
    bootstrap = TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S)
    if where == "creation" and rank.rank == ABSENT:
        return rank.wait_for("end")
    at: list[float] = []
    main = threading.get_ident()

    def monitor() -> None:
        rank_waits.wait()
        time.sleep(0.3)  # the event comes just before the call that waits
        at.append(inject(main) if injects and rank.rank == 0 else time.monotonic())

    rank_waits = threading.Event()
    monitoring = threading.Thread(target=monitor)
    monitoring.start()
    error, ended = "", 0.0
    try:
        if where == "creation":
            rank_waits.set()
        with Buffer(None, config, bootstrap=bootstrap) as buffer:
            x_TH = torch.ones(T, H, dtype=torch.bfloat16)
            topk_idx_TK = torch.arange(T * K).reshape(T, K) % E
            result = buffer.dispatch(x_TH, topk_idx_TK)
            if rank.rank == ABSENT:
                rank_waits.set()
                monitoring.join()
                return rank.wait_for("end")
            pending = None
            rank.mark("waits")
            rank_waits.set()
            if where == "dispatch":
                buffer.dispatch(x_TH, topk_idx_TK)
            elif where == "combine":
                buffer.combine(result.rows, result.handle)
            elif where == "close, pending":
                pending = buffer.combine_async(result.rows, result.handle)
        assert pending is None or pending.done
    except (Injected, CommunicationError) as caught:
        error = type(caught).__name__
    ended = time.monotonic()
    monitoring.join()
    return error, ended - at[0], Path("/proc/self/maps").read_text().count("uccl_ep.")


def ends_of(where: str, ranks: ProcessRanks) -> dict[int, Any]:
    waiting = [rank for rank in range(len(DOMAINS)) if rank != ABSENT]
    if where == "creation":  # the others wait for the store, which nobody tells anything
        waiting = [0]
    outcomes = ranks.outcomes(timeout_s=20, ranks=waiting)
    assert not any(outcome.error for outcome in outcomes.values()), outcomes
    return {rank: outcome.value for rank, outcome in outcomes.items()}


@pytest.mark.parametrize("where", ["creation", "dispatch", "combine", "close", "close, pending"])
def test_an_injected_exception_ends_a_wait_within_a_second(where: str) -> None:
    with ProcessRanks(len(DOMAINS), wait_for_what_does_not_come, (where, True)) as ranks:
        seen = ends_of(where, ranks)
    # close() raises no error of an operation
    others = "" if where.startswith("close") else "PeerFailed"
    for rank, (error, seconds, mappings) in seen.items():
        assert error == ("Injected" if rank == 0 else others)
        assert seconds < SOON_S + (0.5 if rank else 0.0), f"rank {rank}"
        assert mappings == 0
    assert set(seen) == ({0} if where == "creation" else {0, 1, 3})


def test_without_one_the_wait_goes_on() -> None:
    """Control: nothing else ends it so soon."""
    with ProcessRanks(len(DOMAINS), wait_for_what_does_not_come, ("combine", False)) as ranks:
        ranks.wait_mark("waits", [0, 1, 3])
        with pytest.raises(AssertionError, match="still run"):
            ranks.outcomes(timeout_s=2 * SOON_S, ranks=[0, 1, 3])
