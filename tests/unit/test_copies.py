"""What belongs to a process has no copies elsewhere: who asks for one is told what to do instead."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.by_hand import H, T, close, create, dispatch, inputs
from uccl_ep_train import Buffer, LocalBootstrap, deep_ep
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.errors import InputError
from uccl_ep_train.group.bootstrap import StoreBootstrap

WAYS: list[Callable[[Any], Any]] = [
    pickle.dumps,
    lambda held: pickle.dumps(held, 0),  # of a native object, it ended the process
    lambda held: torch.save(held, io.BytesIO()),
]


@pytest.fixture(name="buffer", scope="module")
def _buffer() -> Iterator[Buffer]:
    buffers = create(1, low_latency_tokens=T, low_latency_topk=2)
    yield buffers[0]
    close(buffers)


def slots(buffer: Buffer) -> Any:
    return LowLatency(buffer).dispatch(torch.ones(T, H, dtype=torch.bfloat16), torch.zeros(T, 1).long())


MADE: dict[str, Callable[[Buffer, Path], Any]] = {
    "PendingDispatch": lambda buffer, _: dispatch_async(buffer),
    "PendingCombine": lambda buffer, _: combine_async(buffer),
    "LowLatency": lambda buffer, _: LowLatency(buffer),
    "Sent": lambda buffer, _: sent(buffer),
    "Trace": lambda buffer, path: buffer.trace(path),
    "Call": lambda buffer, _: buffer.preparing("dispatch"),
    "LocalBootstrap": lambda *_: LocalBootstrap.create(1)[0],
    "StoreBootstrap": lambda *_: StoreBootstrap(dist.HashStore(), 0, 1, name="copies"),
    "Buffer": lambda *_: object.__new__(deep_ep.Buffer),
    "ElasticBuffer": lambda *_: object.__new__(deep_ep.ElasticBuffer),
}


def dispatch_async(buffer: Buffer) -> Any:
    return buffer.dispatch_async(torch.ones(T, H, dtype=torch.bfloat16), torch.zeros(T, 2).long().fill_(-1))


def combine_async(buffer: Buffer) -> Any:
    result = dispatch(buffer)
    return buffer.combine_async(result.rows, result.handle)


def sent(buffer: Buffer) -> Any:
    made = LowLatency(buffer).send_dispatch(torch.ones(T, H, dtype=torch.bfloat16), torch.zeros(T, 1).long())
    made.receive()
    return made


@pytest.mark.parametrize("kind", MADE)
def test_what_works_with_other_ranks_has_no_copies(buffer: Buffer, tmp_path: Path, kind: str) -> None:
    made = MADE[kind](buffer, tmp_path / "trace")
    for way in (copy.copy, copy.deepcopy, *WAYS):
        with pytest.raises(InputError, match=f"an? {kind} has no copies, .*; allowed is "):
            way(made)


@pytest.mark.parametrize("make", [dispatch, slots], ids=["dispatch", "low latency"])
def test_a_handle_is_its_own_copy_and_goes_nowhere_else(
    buffer: Buffer, make: Callable[[Buffer], Any]
) -> None:
    result = make(buffer)
    kind = type(result.handle).__name__
    for way in WAYS:
        with pytest.raises(InputError, match=f"an? {kind} has no copies in other processes and files"):
            way(result)
    for copied in (copy.copy(result), copy.deepcopy(result)):
        assert copied.handle is result.handle
    rows = copy.deepcopy(dispatch(buffer))
    assert torch.equal(buffer.combine(rows.rows, rows.handle), 2 * inputs(buffer.rank)[0])
