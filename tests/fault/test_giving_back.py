"""`close` gives everything back at once, although the buffer, its handles, results and tracebacks live on."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.errors import ClosedError, CommunicationError, EpError

pytestmark = pytest.mark.fault

T, H, K, E, RANKS = 30, 128, 2, 8, 4
SETTINGS: dict[str, Any] = {
    "num_experts": E, "hidden": H, "budget_bytes": 8 << 20, "dispatch_dtype": "bf16",
    "arrival_timeout_s": 30.0, "progress_timeout_s": 10.0,
}  # fmt: skip
LAYOUTS = pytest.mark.parametrize("domains", [(0, 0, 0, 0), (0, 0, 1, 1)], ids=["one domain", "two domains"])
NOTHING = {"mapped bytes": 0, "descriptors": 0, "names": 0, "threads": 0}


def held() -> dict[str, int]:
    """What this process has of engines: shared memory, descriptors of it and of processes, names, threads."""
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "uccl_ep." in line:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            mapped += end - begin
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the one that lists
            continue
    threads = []
    for task in Path("/proc/self/task").iterdir():
        try:
            threads.append((task / "comm").read_text())
        except OSError:
            continue
    return {
        "mapped bytes": mapped,
        "descriptors": sum("uccl_ep." in link or "pidfd" in link for link in links),
        "names": sum(name.startswith(f"uccl_ep.{os.getpid()}.") for name in os.listdir("/dev/shm")),
        "threads": sum(name.startswith("uccl_ep") for name in threads),
    }


@pytest.fixture(autouse=True)
def alone() -> Any:
    """No garbage collection: nothing may wait for it."""
    gc.collect()
    assert held()["mapped bytes"] == 0
    gc.disable()
    yield
    gc.enable()


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(T, H, dtype=torch.bfloat16), torch.arange(T * K).reshape(T, K) % E, torch.ones(T, K)


def live_and_die(domains: tuple[int, ...], end: Callable[[int, Buffer], Any]) -> list[Any]:
    """By rank, all that a program may keep of a buffer that was used, then closed in this or that way: the
    buffer, a result with its handle, a pending operation, and what `end` returns.
    """
    used = threading.Barrier(RANKS)

    def step(rank: int, buffer: Buffer) -> list[Any]:
        result = buffer.dispatch(*inputs())
        pending = buffer.combine_async(result.rows, result.handle)
        pending.wait()
        used.wait(30)
        return [buffer, result, pending, end(rank, buffer)]

    with RankGroup(RANKS, SETTINGS | {"domains": domains}) as group:
        kept = group.run(step)
        group.broken = True
    return kept


def close(rank: int, buffer: Buffer) -> None:
    buffer.close()


def fail(rank: int, buffer: Buffer) -> BaseException | None:
    """Rank 0 gives up; the others keep the exception of the call that they were in."""
    if rank == 0:
        buffer.close(abort=True)
        return None
    try:
        while True:
            buffer.dispatch(*inputs())
    except CommunicationError as error:
        buffer.close(abort=True)
        return error


@LAYOUTS
@pytest.mark.parametrize("end", [close, fail])
def test_a_closed_buffer_that_is_referenced_holds_nothing(domains: tuple[int, ...], end: Any) -> None:
    kept = live_and_die(domains, end)
    assert held() == NOTHING
    for buffer, result, pending, error in kept:
        assert buffer.closed and buffer.memory_plan().total_bytes > 0
        assert buffer.stats()["dispatch.calls"] >= 1
        assert result.handle.num_rows == len(result.rows) and pending.wait().shape == (T, H)
        with pytest.raises(ClosedError):
            buffer.dispatch(*inputs())
        if error is not None:
            assert "buffer.dispatch(*inputs())" in "".join(traceback.format_exception(error))
    assert [error is not None for *_, error in kept] == [end is fail and rank > 0 for rank in range(RANKS)]


@LAYOUTS
def test_a_live_buffer_holds_what_is_looked_for(domains: tuple[int, ...]) -> None:
    """Control: each of the figures shows a buffer that has not been closed."""
    with RankGroup(RANKS, SETTINGS | {"domains": domains}):
        deadline = time.monotonic() + 10  # a thread names itself when it first runs
        while (during := held())["threads"] < RANKS and time.monotonic() < deadline:
            time.sleep(0.01)
        assert during["mapped bytes"] > RANKS * (1 << 20) and during["threads"] >= RANKS
        assert during["descriptors"] > 0
    assert held() == NOTHING


def test_twenty_lives_that_are_all_referenced_do_not_grow() -> None:
    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    kept = [live_and_die((0, 0, 1, 1), close)]  # torch starts threads of its own when it is first used
    threads, descriptors = tasks(), len(os.listdir("/proc/self/fd"))
    for number in range(20):
        kept.append(live_and_die((0, 0, 1, 1), fail if number % 2 else close))
        assert held() == NOTHING
    # A thread that has ended may be listed for a moment longer; twenty that are left behind are many more.
    assert tasks() < threads + 5 and len(os.listdir("/proc/self/fd")) == descriptors


def test_a_buffer_that_is_closed_while_it_is_traced_still_writes_its_trace(tmp_path: Path) -> None:
    def end(rank: int, buffer: Buffer) -> None:
        with buffer.trace(tmp_path / "trace"):
            buffer.dispatch(*inputs())
            buffer.close()

    kept = live_and_die((0, 0, 1, 1), end)
    assert held() == NOTHING and len(kept) == RANKS
    for rank in range(RANKS):
        assert '"dispatch"' in (tmp_path / f"trace.rank{rank}.json").read_text()


def test_tensors_of_operations_that_failed_are_let_go() -> None:
    """Their pending objects are kept, and nobody waits for them."""
    handles: dict[int, Any] = {}
    dispatched, launched = threading.Barrier(RANKS), threading.Barrier(RANKS)

    def step(rank: int, buffer: Buffer) -> Any:
        handles[rank] = buffer.dispatch(*inputs()).handle
        dispatched.wait(30)
        if rank == 0:
            launched.wait(30)
            buffer.close(abort=True)
            return None
        rows = torch.ones(handles[rank].num_rows, H, dtype=torch.bfloat16)
        watched = weakref.ref(rows)
        pending = buffer.combine_async(rows, handles[rank])
        del rows
        assert watched() is not None  # control: until then they are kept
        launched.wait(30)
        buffer.close(abort=True)
        return pending, watched

    with RankGroup(RANKS, SETTINGS) as group:
        kept = group.run(step)
        group.broken = True
    for pending, watched in kept[1:]:
        assert watched() is None and pending.done
        for _ in range(2):
            with pytest.raises(EpError):
                pending.wait()
    assert sum(handle.num_rows for handle in handles.values()) == RANKS * T * K


def ask(buffer: Buffer, over: threading.Event) -> None:
    """All that a thread may ask while another one closes the buffer."""
    while not over.is_set():
        assert buffer.stats()["dispatch.calls"] >= 1
        assert buffer.memory_plan().total_bytes > 0
        buffer._engine.stats()
        try:
            buffer.check()
        except CommunicationError:
            time.sleep(0)


@LAYOUTS
@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_a_close_on_another_thread_ends_a_wait_with_an_error(domains: tuple[int, ...], where: str) -> None:
    """Rank 0 does not come; every other rank waits, and a thread of its own asks and closes."""
    together = threading.Barrier(RANKS)
    for _ in range(5):
        with RankGroup(RANKS, SETTINGS | {"domains": domains}) as group:

            def step(rank: int, buffer: Buffer) -> str:
                result = buffer.dispatch(*inputs())
                together.wait(30)
                over = threading.Event()
                asking = threading.Thread(target=ask, args=(buffer, over))
                closing = threading.Timer(0.1, buffer.close, kwargs={"abort": True})
                asking.start()
                closing.start()
                try:
                    if rank != 0 and where == "dispatch":
                        buffer.dispatch(*inputs())
                    elif rank != 0:
                        buffer.combine(result.rows, result.handle)
                except EpError as error:
                    return type(error).__name__
                finally:
                    closing.join()
                    over.set()
                    asking.join()
                return ""

            started = time.monotonic()
            seen = group.run(step)
            group.broken = True
        assert time.monotonic() - started < 5
        assert seen[0] == "" and set(seen[1:]) <= {"PeerFailed", "ClosedError"}
        assert held() == NOTHING
