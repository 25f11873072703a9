"""Payloads of ranks in an exchange, as JSON. They may come from foreign processes, so they are validated."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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


def split(rank: int, what: str, answers: Sequence[bytes]) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """The three parts of the payload of every rank, with a zero byte behind the first and behind the second:
    all first parts, all second and all third ones.

    Raises what `decode` raises.
    """
    firsts, seconds, thirds = [], [], []
    for peer, answer in enumerate(answers):
        parts = answer.split(b"\0", 2)
        if len(parts) != 3:
            raise malformed(rank, what, peer, answer)
        firsts.append(parts[0])
        seconds.append(parts[1])
        thirds.append(parts[2])
    return firsts, seconds, thirds


def decode_all(
    rank: int, what: str, answers: Sequence[bytes], shape: Callable[[Any], Decoded]
) -> list[Decoded]:
    """`decode` of the payload of every rank. Equal ones, of which a large group has many, share a result."""
    known: dict[bytes, Decoded] = {}
    for peer, answer in enumerate(answers):
        if answer not in known:
            known[answer] = decode(rank, what, peer, answer, shape)
    return [known[answer] for answer in answers]


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
