"""Errors of operations say whom to look at and where, and what the other rank's exception was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from tests.process_ranks import ProcessRanks, Rank
from tests.unit.by_hand import close, create, dispatch, inputs, on_all, outcome
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import (
    ArrivalTimeout,
    CommunicationError,
    PeerDied,
    PeerFailed,
    RankMismatchError,
    told,
)
from uccl_ep_train.group.bootstrap import TorchBootstrap
from uccl_ep_train.group.explain import explain

HERE = f"on {os.uname().nodename} (pid {os.getpid()})"


class Known:
    host = "node7"

    def has_ended(self) -> bool:
        return False

    def __str__(self) -> str:
        return "on node7 (pid 4711)"


def explained(error: CommunicationError, doing: str = "") -> str:
    explain(error, [Known()] * 4, doing)
    return str(error)


def test_a_death_names_host_process_call_and_where_to_look() -> None:
    look = "see its log, and dmesg on node7 (the out-of-memory killer)"
    died = PeerDied("rank 0: rank 3 (pid 4711) died", rank=0, peer=3, epoch=17)
    assert explained(died, "combine") == (
        f"rank 3 on node7 (pid 4711) died in combine of call 17 on the buffer; {look}: "
        "rank 0: rank 3 (pid 4711) died"
    )
    assert died.again().fields() == died.fields() and str(died.again()) == str(died)
    between = explained(PeerDied("x", rank=0, peer=3, epoch=0))
    assert between == f"rank 3 on node7 (pid 4711) died; {look}: x"


def test_what_names_nobody_or_says_all_stays_as_it_is() -> None:
    assert explained(ArrivalTimeout("x", rank=0, peer=-1)) == "x"
    assert explained(PeerFailed("x", peer=4)) == "x"
    assert explained(RankMismatchError("rank 0 called a, rank 1 called b", rank=0, peer=1)).endswith(" b")


def test_an_exception_is_told_in_one_line_that_fits_into_a_record() -> None:
    assert told(ValueError("two\n  lines")) == "ValueError: two lines"
    assert told(KeyboardInterrupt()) == "KeyboardInterrupt"
    long = told(ValueError("x" * 1000))
    assert len(long) == 150 and long.startswith("ValueError: xxx") and long.endswith("...")


def test_an_arrival_timeout_names_first_whom_to_look_at() -> None:
    buffers = create(2, arrival_timeout_s=0.5)
    error = outcome(lambda: dispatch(buffers[0]))
    assert isinstance(error, ArrivalTimeout) and error.peer == 1
    assert str(error).startswith(f"look first at rank 1 {HERE}: call 1 on the buffer: rank 0 waited ")
    assert str(outcome(buffers[0].check)) == str(error)
    for buffer in buffers:
        buffer.close(abort=True)


# --------------------------------------------------------------------- the exception of another rank


def leaves_its_block(buffer: Buffer) -> None:
    with suppress(ZeroDivisionError), buffer:
        raise ZeroDivisionError("no experts today")


def aborts_while_it_handles(buffer: Buffer) -> None:
    try:
        raise ZeroDivisionError("no experts today")
    except ZeroDivisionError:
        buffer.close(abort=True)


def gives_an_operation_up(buffer: Buffer) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no experts today")

    buffer._launcher._receive = fail  # type: ignore[method-assign]
    with suppress(ZeroDivisionError):
        dispatch(buffer)
    buffer.close()


@pytest.mark.parametrize("how", [leaves_its_block, aborts_while_it_handles, gives_an_operation_up])
@pytest.mark.parametrize("domain_size", [1, 2])
def test_the_others_are_told_the_exception(how: Any, domain_size: int) -> None:
    buffers = create(2, domain_size=domain_size)

    def run(buffer: Buffer) -> None:
        if buffer.rank == 1:
            how(buffer)
        else:
            while True:
                dispatch(buffer)

    error = on_all(buffers, run)[0]
    assert isinstance(error, PeerFailed) and error.peer == 1, error
    assert "rank 1: " in str(error) and "ZeroDivisionError: no experts today" in str(error)
    assert str(error).endswith(f" (rank 1 {HERE})")
    buffers[0].close()


def test_an_abort_without_an_exception_names_none() -> None:
    """Control: and so does one in another thread than the one that handles it."""
    buffers = create(2)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        thread = threading.Thread(target=lambda: buffers[1].close(abort=True))
        thread.start()
        thread.join()
    error = outcome(lambda: dispatch(buffers[0]))
    assert isinstance(error, PeerFailed) and "closed its buffer while the others" in str(error)
    assert "ZeroDivision" not in str(error)
    buffers[0].close()


ENDS = """
import datetime, sys, time
import torch
import torch.distributed as dist
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.group.bootstrap import StoreBootstrap

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
config = EpConfig(num_experts=4, hidden=128, budget_bytes=4 << 20, backend="host")
buffer = Buffer(None, config, bootstrap=StoreBootstrap(store, rank, 2, name="ends", timeout_s=60.0))
x, idx = torch.ones(8, 128, dtype=torch.bfloat16), torch.arange(16).reshape(8, 2) % 4
buffer.dispatch(x, idx)
if rank == 1:
    raise ZeroDivisionError("no experts today")
while True:
    buffer.dispatch(x, idx)
"""


def test_an_exception_that_ends_the_program_is_told() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen([sys.executable, "-c", ENDS, str(rank), str(store.port)], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    last = errors[0].strip().splitlines()[-1]
    assert "PeerFailed" in last
    assert "rank 1: its program was ended by ZeroDivisionError: no experts today" in last
    assert errors[1].strip().endswith("ZeroDivisionError: no experts today")


# ------------------------------------------------------------------------------------------ deaths


def use_until_it_fails(rank: Rank) -> None:
    config = EpConfig(num_experts=8, hidden=128, budget_bytes=4 << 20, backend="host")
    buffer = Buffer(None, config, bootstrap=TorchBootstrap(rank.group, timeout_s=60.0))
    x, idx, _ = inputs(rank.rank)
    result = buffer.dispatch(x, idx)
    rank.mark("used", os.getpid())
    if rank.rank == 1:
        rank.wait_for("end")
    buffer.combine(result.rows, result.handle)


def test_a_rank_that_is_killed_in_use_is_named_with_its_host_process_and_call() -> None:
    with ProcessRanks(2, use_until_it_fails) as ranks:
        _, pid = ranks.wait_mark("used")
        time.sleep(0.2)
        ranks.kill(1)
        error = ranks.outcomes(timeout_s=20, ranks=[0])[0]
    host = os.uname().nodename
    assert error.error == "PeerDied" and error.fields["peer"] == 1
    assert error.message.startswith(
        f"rank 1 on {host} (pid {pid}) died in combine of call 2 on the buffer; see its log, and dmesg on "
        f"{host} (the out-of-memory killer)"
    )


def test_buffers_that_close_together_say_nothing() -> None:
    """Control: the figures above are of failures."""
    buffers = create(2)
    on_all(buffers, dispatch)
    close(buffers)
