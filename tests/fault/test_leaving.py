"""Ranks that leave: by an exception, by Ctrl-C, too early, with operations pending, again and again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.cases import EngineSpec, check_case, make_case
from tests.harness import RankGroup
from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError, EpError, PeerFailed
from uccl_ep_train.group.bootstrap import TorchBootstrap

pytestmark = pytest.mark.fault

DOMAINS = (0, 0, 1, 1)
T, H, K, E = 30, 128, 2, 8
LEAVER = 2
PROMPTLY_S = 2.0  # far below the deadlines
CLOSED_GRACE_S = 1.0  # how long what a closed rank has sent may be under way

SETTINGS: dict[str, Any] = {
    "num_experts": E, "hidden": H, "domains": DOMAINS, "budget_bytes": 4 << 20, "dispatch_dtype": "bf16",
    "arrival_timeout_s": 60.0, "progress_timeout_s": 30.0,
}  # fmt: skip


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(T, H, dtype=dtype), torch.arange(T * K).reshape(T, K) % E, torch.ones(T, K)


def make_buffer(rank: Rank, **changes: Any) -> Buffer:
    bootstrap = TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S)
    return Buffer(None, EpConfig(**(SETTINGS | changes)), bootstrap=bootstrap)


def use(buffer: Buffer) -> Any:
    result = buffer.dispatch(*inputs())
    return buffer.combine(result.rows, result.handle)


def use_until_it_fails(rank: Rank, buffer: Buffer) -> tuple[str, dict[str, Any], float]:
    """Class and fields of the error, and when it was raised."""
    try:
        while True:
            use(buffer)
    except CommunicationError as error:
        return type(error).__name__, error.fields(), time.monotonic()


# ------------------------------------------------------------------------ exceptions and early ends


def leave_somehow(rank: Rank, how: str) -> Any:
    left = 0.0
    try:
        with make_buffer(rank) as buffer:
            for _ in range(3):
                use(buffer)
            if rank.rank != LEAVER:
                return use_until_it_fails(rank, buffer)
            result = buffer.dispatch(*inputs())
            pending = buffer.combine_async(result.rows, result.handle) if "pending" in how else None
            left = time.monotonic()
            if "raises" in how:
                raise ZeroDivisionError
        assert pending is None or pending.wait().shape == (T, H)
    except ZeroDivisionError:
        pass
    return left, time.monotonic()


@pytest.mark.parametrize("how", ["raises", "raises, pending", "closes", "closes, pending"])
def test_when_a_rank_leaves_the_others_raise_at_once(how: str) -> None:
    with ProcessRanks(len(DOMAINS), leave_somehow, (how,)) as ranks:
        results = ranks.results()
    left, gone = results[LEAVER]
    patience_s = PROMPTLY_S + (CLOSED_GRACE_S if "closes" in how else 0.0)
    assert gone - left < patience_s
    for rank in range(len(DOMAINS)):
        if rank != LEAVER:
            error, fields, raised = results[rank]
            assert (error, fields["peer"]) == ("PeerFailed", LEAVER), (error, fields)
            assert 0 < raised - left < patience_s


def test_ranks_that_leave_together_raise_nothing() -> None:
    """Control: leaving is no error when nobody counts on the leaver any more."""
    with RankGroup(4, SETTINGS) as group:
        group.run(lambda rank, buffer: use(buffer) is not None)
        started = time.monotonic()
    assert time.monotonic() - started < PROMPTLY_S


def test_close_waits_for_pending_operations_and_they_succeed() -> None:
    with RankGroup(4, SETTINGS) as group:

        def step(rank: int, buffer: Buffer) -> None:
            expected = use(buffer)
            result = buffer.dispatch(*inputs())
            pending = [buffer.combine_async(result.rows, result.handle) for _ in range(20)]
            buffer.close()
            for entry in pending:
                assert torch.equal(entry.wait(), expected)

        group.run(step)


@pytest.mark.parametrize("abort", [False, True])
def test_close_with_operations_that_cannot_end_does_not_hang(abort: bool) -> None:
    arrival_s = 1.0
    with RankGroup(4, SETTINGS | {"arrival_timeout_s": arrival_s}) as group:
        others = threading.Event()
        dispatched = threading.Barrier(4)

        def step(rank: int, buffer: Buffer) -> None:
            result = buffer.dispatch(*inputs())
            dispatched.wait(30)
            if rank != 0:
                others.wait(30)
                return
            pending = [buffer.combine_async(result.rows, result.handle) for _ in range(5)]
            started = time.monotonic()
            buffer.close(abort=abort)
            seconds = time.monotonic() - started
            others.set()
            assert seconds < PROMPTLY_S + (0.0 if abort else arrival_s)
            for entry in pending:
                with pytest.raises(EpError):
                    entry.wait()

        group.run(step)
        group.broken = True


def close_alone(rank: Rank, progress_s: float) -> float:
    buffer = make_buffer(rank, progress_timeout_s=progress_s)
    use(buffer)
    rank.mark("used")
    if rank.rank == LEAVER:
        rank.wait_for("end")
        return 0.0
    started = time.monotonic()
    buffer.close()
    return time.monotonic() - started


@pytest.mark.parametrize("how", ["dies", "is frozen"])
def test_close_waits_neither_for_the_dead_nor_for_ever(how: str) -> None:
    progress_s = 20.0 if how == "dies" else 1.0
    others = [rank for rank in range(len(DOMAINS)) if rank != LEAVER]
    with ProcessRanks(len(DOMAINS), close_alone, (progress_s,)) as ranks:
        ranks.wait_mark("used")
        if how == "dies":
            time.sleep(0.3)
            ranks.kill(LEAVER)
        else:
            ranks.freeze(LEAVER)
        outcomes = ranks.outcomes(ranks=others)
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
        limit = 0.3 + PROMPTLY_S if how == "dies" else progress_s + PROMPTLY_S
        assert outcome.value < limit


# --------------------------------------------------------------------------------------- Ctrl-C


def wait_interrupted(rank: Rank, where: str) -> Any:
    """Rank LEAVER does not come; the others say what ended their wait, and when they were out of it."""
    if where == "creation":
        if rank.rank == LEAVER:
            rank.wait_for("end")
            return None
        rank.mark("waits")
        try:
            make_buffer(rank)
        except (KeyboardInterrupt, CommunicationError) as error:
            return type(error).__name__, time.monotonic()
    buffer = make_buffer(rank)
    x_TH, topk_idx_TK, weights_TK = inputs(torch.float32)
    x_TH.requires_grad_()
    result = buffer.dispatch(x_TH, topk_idx_TK, weights_TK)
    out_TH = buffer.combine(result.rows, result.handle) if where == "backward" else None
    if rank.rank == LEAVER:
        rank.wait_for("end")
        return None
    rank.mark("waits")
    try:
        with buffer:
            if where == "dispatch":
                buffer.dispatch(x_TH, topk_idx_TK)
            elif where == "combine":
                buffer.combine(result.rows, result.handle)
            elif where == "close, pending":
                buffer.combine_async(result.rows, result.handle)
            elif where == "backward":
                assert out_TH is not None
                out_TH.sum().backward()
        return "closed", time.monotonic()
    except (KeyboardInterrupt, CommunicationError) as error:
        return type(error).__name__, time.monotonic()


def interrupt(ranks: ProcessRanks, who: list[int]) -> float:
    # The mark comes just before the call that waits.
    time.sleep(0.3)
    at = time.monotonic()
    for rank in who:
        ranks.interrupt(rank)
    return at


@pytest.mark.parametrize("where", ["dispatch", "combine", "backward", "close", "close, pending"])
def test_ctrl_c_ends_a_wait_at_once_on_every_rank(where: str) -> None:
    waiting = [rank for rank in range(len(DOMAINS)) if rank != LEAVER]
    with ProcessRanks(len(DOMAINS), wait_interrupted, (where,)) as ranks:
        ranks.wait_mark("waits", waiting)
        at = interrupt(ranks, [0])
        outcomes = ranks.outcomes(timeout_s=20, ranks=waiting)
        ranks.tell("end")
    others = (
        "closed" if where.startswith("close") else "PeerFailed"
    )  # close() raises no error of an operation
    for rank, outcome in outcomes.items():
        assert not outcome.error, outcome.trace
        error, ended = outcome.value
        assert error == ("KeyboardInterrupt" if rank == 0 else others)
        # The buffer is closed by then, too.
        assert 0 < ended - at < PROMPTLY_S


@pytest.mark.parametrize("where", ["creation", "combine"])
def test_a_ctrl_c_that_all_ranks_get_ends_all(where: str) -> None:
    waiting = [rank for rank in range(len(DOMAINS)) if rank != LEAVER]
    with ProcessRanks(len(DOMAINS), wait_interrupted, (where,)) as ranks:
        ranks.wait_mark("waits", waiting)
        at = interrupt(ranks, waiting)
        outcomes = ranks.outcomes(timeout_s=20, ranks=waiting)
        ranks.tell("end")
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
        # Who hears of another one's end first raises that; both are typed.
        assert outcome.value[0] in ("KeyboardInterrupt", "PeerFailed") and outcome.value[1] - at < PROMPTLY_S
    assert "KeyboardInterrupt" in {outcome.value[0] for outcome in outcomes.values()}


# ------------------------------------------------------------------------------ again and again


def resources() -> dict[str, int]:
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("uccl_ep."),
    }


def segments() -> set[str]:
    """Names of shared memory, less what processes of somebody else's tests map at this moment."""
    names = {name for name in os.listdir("/dev/shm") if name.startswith("uccl_ep")}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text() if names else ""
        except OSError:  # The process has ended, or is not ours to look at.
            continue
        names = {name for name in names if name not in text}
    return names


def cycle(number: int) -> None:
    spec = EngineSpec(domains=DOMAINS, num_experts=E, settings=(("budget_bytes", 4 << 20),))
    with RankGroup(4, spec.config()) as group:
        check_case(group, make_case(number, spec, max_tokens=8))
        if number % 3 == 2:
            # Every third life ends with an error.
            def step(rank: int, buffer: Buffer) -> None:
                if rank == LEAVER:
                    buffer.close(abort=True)
                else:
                    with pytest.raises(PeerFailed):
                        use(buffer)

            group.run(step)
            group.broken = True


def test_fifty_lives_of_a_buffer_leave_nothing_behind() -> None:
    for number in range(3):
        cycle(number)
    gc.collect()
    names, before = segments(), resources()
    for number in range(50):
        cycle(number)
    gc.collect()
    assert resources() == before and before["mappings"] == 0
    assert segments() <= names


def test_what_a_live_buffer_holds_is_seen() -> None:
    """Control: the figures of the test above would show a buffer that is left behind."""
    gc.collect()  # what earlier tests have left must not go in between
    before, mine = resources(), Path("/proc/self/maps")
    with RankGroup(4, SETTINGS):
        during = resources()
        # A worker, a proxy, and the harness's own thread for each rank.
        assert during["threads"] >= before["threads"] + 12
        assert during["descriptors"] > before["descriptors"] and during["mappings"] >= 4
        # The names go as soon as all ranks have mapped them.
        mapped = [line for line in mine.read_text().splitlines() if "uccl_ep." in line]
        assert all(line.endswith("(deleted)") for line in mapped)


# --------------------------------------------------------------------------- ends of the interpreter

EXIT = """
import datetime, sys, time
import torch
import torch.distributed as dist
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.group.bootstrap import StoreBootstrap

rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
config = EpConfig(
    num_experts=4, hidden=128, domains=(0, 1), transport="loop", budget_bytes=4 << 20, dispatch_dtype="bf16"
)
buffer = Buffer(None, config, bootstrap=StoreBootstrap(store, rank, 2, name="exit", timeout_s=60.0))
x, idx = torch.ones(8, 128, dtype=torch.bfloat16), torch.arange(16).reshape(8, 2) % 4
result = buffer.dispatch(x, idx)
buffer.combine(result.rows, result.handle)
print("ready", flush=True)
sys.stdin.readline()  # who leaves now leaves nobody inside of the operations above
if how == "pending" and rank == 1:
    pending = [buffer.combine_async(result.rows, result.handle) for _ in range(3)]
if how == "raises" and rank == 1:
    raise ZeroDivisionError
if how != "together" and rank == 0:
    if how == "pending":
        time.sleep(2.0)  # Rank 1 is gone by then.
    while True:
        buffer.combine(result.rows, result.handle)
"""


@pytest.mark.parametrize(
    "how",
    ["together", "pending", *(pytest.param(how, marks=pytest.mark.slow) for how in ("alone", "raises"))],
)
def test_an_interpreter_that_exits_without_close_tells_the_other_and_does_not_hang(how: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, str(rank), str(store.port), how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "ready\n", process.communicate(timeout=30)[1]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        started = time.monotonic()
        errors = [process.communicate(timeout=30)[1] for process in processes]
        assert time.monotonic() - started < 10
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    if how == "together":
        assert codes == [0, 0] and errors == ["", ""]
    else:
        assert codes == [1, 1 if how == "raises" else 0], errors
        assert "PeerFailed" in errors[0] and "rank 1" in errors[0].splitlines()[-1]
