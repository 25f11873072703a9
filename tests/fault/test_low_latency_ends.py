"""Low latency without masks: who waits for a rank that does not come raises a typed error in time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.cases import LAYOUTS
from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.errors import CommunicationError
from uccl_ep_train.group.bootstrap import TorchBootstrap

pytestmark = [pytest.mark.fault, pytest.mark.waits]

T, H, K, E = 8, 256, 2, 8
ABSENT = 2
ARRIVAL_S, PROMPTLY_S = 3.0, 2.0
LONG_S = 40.0  # nothing but the event ends a wait: not the deadline either, on a busy machine


def wait_for_absent(rank: Rank, layout: str, where: str, arrival_s: float) -> Any:
    """What ended the wait: the error, the rank that it names, its text, and when."""
    config = EpConfig(
        num_experts=E, hidden=H, domains=LAYOUTS[layout], backend="host", budget_bytes=8 << 20,
        low_latency_tokens=T, low_latency_topk=K, arrival_timeout_s=arrival_s, progress_timeout_s=3.0,
    )  # fmt: skip
    buffer = Buffer(None, config, bootstrap=TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S))
    calls = LowLatency(buffer)
    x = torch.ones(T, H, dtype=torch.bfloat16)
    topk_idx, weights = torch.arange(T * K).reshape(T, K) % E, torch.ones(T, K)
    got = calls.dispatch(x, topk_idx, wire="bf16")
    assert isinstance(got.rows, torch.Tensor)
    calls.combine(got.rows, topk_idx, weights, got.handle)
    if rank.rank == ABSENT:
        rank.mark("waits")
        if rank.wait_for("end") == "leave":
            buffer.close()
        return None
    rank.mark("waits")
    try:
        with buffer:
            if where == "dispatch":
                calls.dispatch(x, topk_idx)
            elif where == "combine":
                calls.combine(got.rows, topk_idx, weights, got.handle)
            else:
                sent = calls.send_combine(got.rows, topk_idx, weights, got.handle)
                time.sleep(0.2)
                sent.receive()
    except (KeyboardInterrupt, CommunicationError) as error:
        return type(error).__name__, getattr(error, "peer", None), str(error), time.monotonic()
    return "", None, "", time.monotonic()


def ends(layout: str, where: str, how: str) -> tuple[dict[int, Any], float]:
    waiting = [rank for rank in range(len(LAYOUTS[layout])) if rank != ABSENT]
    arrival_s = ARRIVAL_S if how == "freeze" else LONG_S
    with ProcessRanks(len(LAYOUTS[layout]), wait_for_absent, (layout, where, arrival_s)) as ranks:
        ranks.wait_mark("waits")
        time.sleep(0.6)
        at = time.monotonic()
        if how == "kill":
            ranks.kill(ABSENT)
        elif how == "freeze":
            ranks.freeze(ABSENT)
        elif how == "interrupt":
            ranks.interrupt(0)
        elif how == "leave":
            ranks.tell("end", "leave")
        outcomes = ranks.outcomes(timeout_s=20, ranks=waiting)
        if how == "freeze":
            ranks.thaw(ABSENT)
        if how not in ("kill", "leave"):
            ranks.tell("end")
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
    return {rank: outcome.value for rank, outcome in outcomes.items()}, at


@pytest.mark.parametrize("where", ["dispatch", "combine", "sent combine"])
@pytest.mark.parametrize("layout", ["1x4", "2x2"])
def test_a_rank_that_does_not_come_is_named(layout: str, where: str) -> None:
    for how, error, limit in [
        ("kill", "PeerDied", PROMPTLY_S),
        ("freeze", "ArrivalTimeout", ARRIVAL_S + PROMPTLY_S),
        ("leave", "PeerFailed", PROMPTLY_S + 1.0),
    ]:
        seen, at = ends(layout, where, how)
        for rank, (name, peer, text, ended) in seen.items():
            assert (name, peer) == (error, ABSENT), (how, rank, text)
            assert ended - at < limit, (how, rank, ended - at)
            assert how != "leave" or "closed its buffer before low-latency call" in text, text


@pytest.mark.parametrize("where", ["dispatch", "sent combine"])
def test_ctrl_c_ends_a_wait_on_every_rank(where: str) -> None:
    seen, at = ends("2x2", where, "interrupt")
    for rank, (name, _, text, ended) in seen.items():
        assert name == ("PeerFailed" if rank else "KeyboardInterrupt"), text
        assert 0 < ended - at < PROMPTLY_S
