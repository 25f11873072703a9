"""Error texts for operators: which rank to look at, on which host, and what that rank reported."""

from __future__ import annotations

from collections.abc import Sequence

from uccl_ep_train.errors import (
    ArrivalTimeout,
    CommunicationError,
    PeerDied,
    PeerFailed,
    ProgressTimeout,
    TransportError,
)
from uccl_ep_train.group.ends import Process, where_to_look


def explain(error: CommunicationError, ranks: Sequence[Process], doing: str) -> None:
    """Adds the rank to look at, and its host, to the text of an operation's error.

    ranks  where each runs
    doing  the operation, "" between operations
    """
    peer = error.peer
    if not 0 <= peer < len(ranks):
        return
    who, text = f"rank {peer} {ranks[peer]}", str(error)
    if isinstance(error, PeerDied):
        call = f"call {error.epoch} on the buffer" if error.epoch > 0 else ""
        when = " in " + " of ".join(part for part in (doing, call) if part) if doing or call else ""
        error.rewrite(f"{who} died{when}; {where_to_look(ranks[peer])}: {text}")
    elif isinstance(error, ArrivalTimeout | ProgressTimeout):
        error.rewrite(f"look first at {who}: {text}")
    elif isinstance(error, PeerFailed | TransportError):
        error.rewrite(f"{text} ({who})")
