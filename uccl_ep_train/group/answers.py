"""Payloads of ranks in an exchange, as JSON. They may come from foreign processes, so they are validated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from uccl_ep_train.errors import TransportError

MOST_SHOWN = 80
"""Characters of a foreign text in an error."""

Decoded = TypeVar("Decoded")


def decode(rank: int, what: str, peer: int, answer: bytes, shape: Callable[[Any], Decoded]) -> Decoded:
    """The payload of rank `peer` for `rank`, from JSON; `shape` raises `ValueError` if it is not valid.

    Raises `TransportError` naming the rank: a foreign process, or another version of this package, has
    written to the store.
    """
    try:
        return shape(json.loads(answer))
    except (ValueError, RecursionError) as error:
        raise malformed(rank, what, peer, answer) from error


def require(holds: bool, text: str) -> None:
    """For the shapes of `decode`."""
    if not holds:
        raise ValueError(text)


def malformed(rank: int, what: str, peer: int, answer: bytes) -> TransportError:
    return TransportError(
        f"creation, {what}: rank {peer} sent {answer[:MOST_SHOWN]!r}, which no rank of this version sends",
        rank=rank,
        step="bootstrap",
        peer=peer,
        expected=what,
        seen=len(answer),
    )
