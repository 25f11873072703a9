"""What ranks say in an exchange, as JSON: it may come from strangers, and is looked at before it is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from uccl_ep_train.errors import TransportError

if TYPE_CHECKING:
    from uccl_ep_train.group.bootstrap import Bootstrap

MOST_SHOWN = 80
"""Characters of a foreign text in an error."""

Decoded = TypeVar("Decoded")


def decode(
    bootstrap: Bootstrap, what: str, peer: int, answer: bytes, shape: Callable[[Any], Decoded]
) -> Decoded:
    """What rank `peer` said in an exchange, from JSON; `shape` raises `ValueError` for what none of us says.

    Raises `TransportError` naming the rank: a stranger, or another version of this package, has written to
    our store.
    """
    try:
        return shape(json.loads(answer))
    except (ValueError, RecursionError) as error:
        raise malformed(bootstrap, what, peer, answer) from error


def require(holds: bool, text: str) -> None:
    """For the shapes of `decode`."""
    if not holds:
        raise ValueError(text)


def malformed(bootstrap: Bootstrap, what: str, peer: int, answer: bytes) -> TransportError:
    return TransportError(
        f"creation, {what}: rank {peer} sent {answer[:MOST_SHOWN]!r}, which no rank of this version sends",
        rank=bootstrap.rank,
        step="bootstrap",
        peer=peer,
        expected=what,
        seen=len(answer),
    )
