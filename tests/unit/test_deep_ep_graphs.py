"""What the module keeps of a handle is right when some calls are captured in CUDA graphs.

There is no GPU: the tests say when a stream is captured.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from uccl_ep_train import EpConfig
from uccl_ep_train.core import cuda
from uccl_ep_train.deep_ep import facts
from uccl_ep_train.errors import ConfigError

Capture = Callable[[bool], None]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Says whether the current stream is captured."""

    def change(captured: bool) -> None:
        monkeypatch.setattr(facts, "is_capturing", lambda _: captured)

    change(False)
    return change


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
