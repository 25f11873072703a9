"""What a rank or a stranger puts into the store while a buffer is created is taken, or is a typed error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.unit.by_hand import find_domains
from uccl_ep_train.errors import EpError
from uccl_ep_train.group import bootstrap, domains, transport
from uccl_ep_train.group.bootstrap import _SteppedBootstrap, exchange
from uccl_ep_train.group.domains import agree_on_config
from uccl_ep_train.group.lifecycle import settle_config
from uccl_ep_train.group.patience import Patience
from uccl_ep_train.settings.config import EpConfig

CONFIG = EpConfig(num_experts=4, hidden=128, backend="host")
EXAMPLES = 100


class WithAStranger(_SteppedBootstrap):
    """Rank 0 of two. `change` makes the other's frame of each step from ours."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        super().__init__(0, 2, 1.0)
        self._change = change

    def _post(self, step: int, frame: bytes, patience: Patience) -> None:
        self._frame = frame

    def _collect(self, step: int, what: str, patience: Patience) -> list[bytes]:
        return [self._frame, self._change(self._frame)]


# What differs from our own frame by a little gets furthest.
SPLICES = st.tuples(st.integers(0, 400), st.integers(0, 40), st.binary(max_size=12))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def spliced(cuts: list[tuple[int, int, bytes]]) -> Callable[[bytes], bytes]:
    def change(frame: bytes) -> bytes:
        for at, removed, added in cuts:
            frame = frame[:at] + added + frame[at + removed :]
        return frame

    return change


def saying(value: Any, sign: bytes) -> Callable[[bytes], bytes]:
    """The step's name as it should be, then any JSON."""
    return lambda frame: frame.partition(b"\0")[0] + b"\0" + sign + json.dumps(value).encode()


def saying_in(value: Any, part: int) -> Callable[[bytes], bytes]:
    """Any JSON as one of the parts of a payload."""

    def change(frame: bytes) -> bytes:
        name, _, payload = frame.partition(b"\0")
        parts = payload[1:].split(b"\0", 2)
        parts[part % len(parts)] = json.dumps(value).encode()
        return name + b"\0" + payload[:1] + b"\0".join(parts)

    return change


CHANGES = st.one_of(
    st.lists(SPLICES, max_size=3).map(spliced),
    st.builds(saying, VALUES, st.sampled_from([b"+", b"-", b""])),
    st.builds(saying_in, VALUES, st.integers(0, 2)),
    st.binary(max_size=64).map(lambda frame: lambda _: frame),
    st.sampled_from([b"[" * 100_000, b'{"generation": 1', b"\xff\xfe", b"9" * 5000]).map(
        lambda body: lambda frame: frame.partition(b"\0")[0] + b"\0+" + body
    ),
)

STEPS: dict[str, Callable[[WithAStranger], Any]] = {
    "exchange": lambda ranks: exchange(ranks, "allocate", lambda: b"handle"),
    "configuration": lambda ranks: agree_on_config(ranks, CONFIG, dict, transport.probes),
    "topology": find_domains,
    "settlement": lambda ranks: settle_config(ranks, CONFIG),
}


def is_taken(step: str, change: Callable[[bytes], bytes]) -> bool:
    try:
        STEPS[step](WithAStranger(change))
    except EpError:
        return False
    return True


@pytest.mark.parametrize("step", STEPS)
@settings(max_examples=EXAMPLES)
@given(change=CHANGES)
def test_whatever_a_rank_says_is_taken_or_a_typed_error(step: str, change: Callable[[bytes], bytes]) -> None:
    is_taken(step, change)


@pytest.mark.parametrize("step", STEPS)
def test_what_our_own_ranks_say_is_taken(step: str) -> None:
    assert is_taken(step, lambda frame: frame)


def test_who_said_it_is_named() -> None:
    with pytest.raises(EpError, match=r"creation, configuration: rank 1 sent b'nothing', which no rank"):
        STEPS["configuration"](WithAStranger(lambda frame: frame.partition(b"\0")[0] + b"\0+nothing"))


@pytest.mark.parametrize("step", ["configuration"])
def test_a_reader_that_does_not_look_is_found(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same inputs, read without a look at their shape. The core reads "topology"."""
    for module in (bootstrap, domains):
        monkeypatch.setattr(
            module, "decode", lambda ranks, what, peer, answer, shape: shape(json.loads(answer))
        )

    @settings(max_examples=EXAMPLES, database=None, print_blob=False, phases=[Phase.generate])
    @given(change=CHANGES)
    def search(change: Callable[[bytes], bytes]) -> None:
        is_taken(step, change)

    with pytest.raises((ValueError, RecursionError, ExceptionGroup)):
        search()
