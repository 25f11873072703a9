"""What the module keeps between calls is right when some of them are captured in CUDA graphs.

There is no GPU: the tests say when a stream is captured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from uccl_ep_train import EpConfig
from uccl_ep_train.core import cuda
from uccl_ep_train.deep_ep import facts, sending
from uccl_ep_train.deep_ep.sending import Sender
from uccl_ep_train.errors import ConfigError

RANK = 2
Capture = Callable[[bool], None]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Says whether the current stream is captured."""

    def change(captured: bool) -> None:
        for module in (facts, sending):
            monkeypatch.setattr(module, "is_capturing", lambda _: captured)

    change(False)
    return change


def sender() -> Sender:
    engine: Any = SimpleNamespace(
        config=SimpleNamespace(num_experts=8), num_ranks=4, rank=RANK, device=torch.device("cpu")
    )
    return Sender(engine)


def check_packed(found: torch.Tensor, tokens: int) -> None:
    assert found[:, 0].tolist() == [RANK + 1] * tokens and found[:, 1].tolist() == list(range(tokens))


def test_numbers_that_are_made_inside_a_graph_are_not_kept(capture: Capture) -> None:
    """They would have values in its replays only."""
    calls = sender()
    check_packed(calls.packed(4, None, None), 4)
    capture(True)
    check_packed(calls.packed(9, None, None), 9)
    calls._heads_of(9).zero_()  # as before a replay
    check_packed(calls.packed(3, None, None), 3)
    capture(False)
    check_packed(calls.packed(9, None, None), 9)


def test_numbers_that_a_graph_reads_outlive_longer_ones(capture: Capture) -> None:
    calls = sender()
    calls.packed(4, None, None)
    capture(True)
    read = StorageWeakRef(calls._heads_of(4).untyped_storage())
    capture(False)
    for tokens in range(5, 200):
        check_packed(calls.packed(tokens, None, None), tokens)
    gc.collect()
    assert not read.expired()
    assert sum(map(len, calls._heads)) < 3 * 199  # though the calls grew one by one


class Counted(facts.Facts):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.times = 0

    @facts.fact
    def number(self) -> int:
        self.times += 1
        return self.times


@pytest.mark.parametrize(("made_inside", "read_inside", "values"), [
    (False, False, [1, 1]), (True, True, [1, 1]), (False, True, [1, 2]), (True, False, [1, 2]),
])  # fmt: skip
def test_a_fact_of_a_handle_is_kept_where_it_is_right_again(
    capture: Capture, made_inside: bool, read_inside: bool, values: list[int]
) -> None:
    capture(made_inside)
    handle = Counted()
    capture(read_inside)
    assert [handle.number, handle.number] == values
    assert isinstance(Counted.number, facts.fact)


@pytest.mark.parametrize("captured", [True, False])
def test_no_buffer_is_made_inside_a_graph(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    monkeypatch.setattr(cuda, "built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    config = EpConfig(num_experts=8, hidden=128)
    if captured:
        with pytest.raises(ConfigError, match="captured in a graph; allowed is before"):
            cuda.choose_device(config)
        config = config.replace(backend="host")
        assert cuda.choose_device(config).type == "cpu"
    else:
        assert cuda.choose_device(config) == torch.device("cuda", 3)
