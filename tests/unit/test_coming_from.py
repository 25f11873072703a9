"""docs/coming_from.md says what the code says: arguments of DeepEP's calls, and calls from C."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_train.deep_ep import Buffer, Config, ElasticBuffer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text()
EVERYWHERE = "allocate_on_comm_stream"
IGNORED_BUT_KEPT = {"explicitly_destroy"}
"""Callers read it."""

CALLS: dict[str, Callable[..., Any]] = {
    "Buffer": Buffer.__init__,
    "Config": Config.__init__,
    "dispatch": Buffer.dispatch,
    "combine": Buffer.combine,
    "low_latency_dispatch": Buffer.low_latency_dispatch,
    "low_latency_combine": Buffer.low_latency_combine,
    "ElasticBuffer": ElasticBuffer.__init__,
    "its dispatch": ElasticBuffer.dispatch,
    "its combine": ElasticBuffer.combine,
}


def rows() -> list[tuple[str, list[str], str]]:
    """(call, names in the second column, what is said) of the table of arguments."""
    found, call = [], ""
    for line in PAGE.split("| call | argument | here |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]:
        first, second, said = (cell.strip() for cell in line.strip()[1:-1].split("|", 2))
        call = first.replace("`", "") or call
        found.append((call, re.findall(r"`([^`]+)`", second), said))
    return found


def unread(function: Callable[..., Any]) -> set[str]:
    """Parameters that the function does not use."""
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(defined, ast.FunctionDef)
    names = {node.id for line in defined.body for node in ast.walk(line) if isinstance(node, ast.Name)}
    return set(inspect.signature(function).parameters) - names - {"self"}


def ignored(call: str) -> set[str]:
    """What the table says of the call."""
    return {name for of, names, said in rows() if of == call and said.startswith("ignored") for name in names}


def test_every_argument_of_the_table_is_one_of_its_call() -> None:
    assert set(CALLS) <= {call for call, _, _ in rows()}
    for call, names, _ in rows():
        if call in CALLS:
            assert not set(names) - set(inspect.signature(CALLS[call]).parameters), (call, names)
        elif call == "masks":
            assert all(hasattr(Buffer, name) for name in names)
    for call in ("get_local_buffer_tensor", "clean_low_latency_buffer"):
        assert hasattr(Buffer, call) and any(call == of for of, _, _ in rows())


@pytest.mark.parametrize("call", [name for name in CALLS if name not in ("Config", "ElasticBuffer")])
def test_the_table_names_every_argument_that_is_ignored(call: str) -> None:
    assert ignored(call) - IGNORED_BUT_KEPT == unread(CALLS[call]) - {EVERYWHERE}
    assert ignored("all calls") == {EVERYWHERE}


def test_what_counts_of_an_elastic_buffer_is_named() -> None:
    """All others are ignored, or only kept for callers."""
    ((names, _),) = [
        (names, said) for _, names, said in rows() if said == "ignored" and "num_max_tokens_per_rank" in names
    ]
    known = {name for call, names, _ in rows() if call == "ElasticBuffer" for name in names}
    assert not unread(ElasticBuffer.__init__) & known and set(names) <= known


def test_an_argument_that_is_not_read_is_found() -> None:
    """Control."""

    def call(self: object, used: int, idle: int = 0) -> int:
        return used

    assert unread(call) == {"idle"}


def test_calls_from_c_are_in_the_header() -> None:
    header = (ROOT / "csrc" / "c_api" / "uccl_ep.h").read_text()
    named = set(re.findall(r"`(uccl_ep_\w+)`", PAGE + (ROOT / "docs" / "c_interface.md").read_text()))
    declared = set(re.findall(r"\b(uccl_ep_\w+)\(", header))
    assert len(named) > 8 and named <= declared, named - declared
    assert "uccl_ep_plan_updates" not in declared
