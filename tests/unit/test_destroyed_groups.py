"""A buffer's error stops optimizers while its torch.distributed group lives, and not after a restart."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.unit.by_hand import SETTINGS, create, dispatch
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError
from uccl_ep_train.group.lifecycle import check_live_buffers, group_is_over

CONFIG = EpConfig(**SETTINGS)


def join() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    join()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def broken(buffer: Buffer) -> Buffer:
    buffer._engine.fail("on purpose")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            buffer._engine.check()
        except CommunicationError:
            return buffer
        time.sleep(0.01)
    raise AssertionError("the buffer did not break")


def step() -> None:
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def sub_group() -> dist.ProcessGroup:
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    return group


@pytest.mark.parametrize("new_group", [lambda: None, sub_group], ids=["default", "another"])
def test_a_broken_buffer_stops_optimizers_until_its_group_is_destroyed_and_others_are_made(
    new_group: Callable[[], dist.ProcessGroup | None],
) -> None:
    buffer = broken(Buffer(new_group(), CONFIG))
    for _ in range(2):
        with pytest.raises(CommunicationError, match="on purpose"):
            step()
    dist.destroy_process_group()
    with pytest.raises(CommunicationError, match="on purpose"):
        step()
    assert not buffer.closed
    join()
    with pytest.warns(UserWarning, match="process group has been destroyed; its error was.*on purpose"):
        step()
    assert buffer.closed
    step()


def test_a_group_that_is_destroyed_alone_takes_its_broken_buffer_along() -> None:
    group = sub_group()
    buffer = broken(Buffer(group, CONFIG))
    with pytest.raises(CommunicationError):
        step()
    dist.destroy_process_group(group)
    with pytest.warns(UserWarning, match="has been destroyed"):
        step()
    assert buffer.closed


def test_the_buffer_of_another_group_still_stops_optimizers() -> None:
    """Control: only its own group counts."""
    buffer = broken(Buffer(None, CONFIG))
    dist.destroy_process_group(sub_group())
    with pytest.raises(CommunicationError):
        step()
    buffer.close(abort=True)
    step()


def test_a_buffer_without_a_torch_group_stops_optimizers_through_all_restarts() -> None:
    (buffer,) = create(1)
    broken(buffer)
    dist.destroy_process_group()
    join()
    with pytest.raises(CommunicationError):
        step()
    assert not group_is_over(buffer)
    buffer.close(abort=True)


def test_a_new_buffer_finds_the_memory_of_broken_ones_free() -> None:
    old = broken(Buffer(None, CONFIG))
    dist.destroy_process_group()
    join()
    assert not old.closed
    with Buffer(None, CONFIG) as new:
        assert old.closed and not new.closed


def test_a_buffer_that_works_outlives_its_group() -> None:
    """Groups serve creation only: one that is gone is not a fault."""
    buffer = Buffer(None, CONFIG)
    dist.destroy_process_group()
    join()
    assert group_is_over(buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_live_buffers()
    with Buffer(None, CONFIG):
        assert dispatch(buffer).rows.shape[0] > 0
    buffer.close()
