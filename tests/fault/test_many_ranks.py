"""A rank of 72 processes is killed or frozen: the 71 others raise in time, and name it."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError
from uccl_ep_train.group.bootstrap import TorchBootstrap

pytestmark = [pytest.mark.fault, pytest.mark.slow]

NUM_RANKS = 72
LAYOUTS = {"9 x 8": tuple(rank // 8 for rank in range(NUM_RANKS)), "1 x 72": (0,) * NUM_RANKS}
# Two cores need seconds for a round of 72 processes.
DEADLINE_S, GRACE_S = 8.0, 2.0
T, H, K = 6, 128, 4


def work_until_it_fails(rank: Rank, domains: tuple[int, ...]) -> tuple[str, int]:
    """The name of the error, and the rank that it names."""
    config = EpConfig(
        num_experts=NUM_RANKS, hidden=H, domains=domains, budget_bytes=24 << 20,
        arrival_timeout_s=DEADLINE_S, progress_timeout_s=DEADLINE_S,
    )  # fmt: skip
    x_TH = torch.ones(T, H, dtype=torch.bfloat16)
    topk_idx_TK = (rank.rank + torch.arange(T * K).reshape(T, K) * 5) % NUM_RANKS
    bootstrap = TorchBootstrap(rank.group, timeout_s=2 * START_TIMEOUT_S)
    with Buffer(None, config, bootstrap=bootstrap) as buffer:
        turn = 0
        try:
            while True:
                result = buffer.dispatch(x_TH, topk_idx_TK)
                sums_TH = buffer.combine(result.rows, result.handle)
                assert torch.equal(sums_TH, K * x_TH)
                turn += 1
                rank.mark(f"turn {turn}")
        except CommunicationError as error:
            return type(error).__name__, error.peer


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_others_raise_in_time_and_name_the_rank(layout: str, how: str) -> None:
    victim = 13
    others = [rank for rank in range(NUM_RANKS) if rank != victim]
    with ProcessRanks(NUM_RANKS, work_until_it_fails, (LAYOUTS[layout],)) as ranks:
        began = time.monotonic()
        ranks.wait_mark("turn 2", timeout_s=2 * START_TIMEOUT_S)
        ready = time.monotonic()
        struck = ranks.kill(victim) if how == "kill" else ranks.freeze(victim)
        outcomes = ranks.outcomes(timeout_s=60, ranks=others)
    assert not [outcome.trace for outcome in outcomes.values() if outcome.error]
    allowed = {"PeerDied"} if how == "kill" else {"ArrivalTimeout", "ProgressTimeout"}
    seen = Counter(outcome.value for outcome in outcomes.values())
    assert {error for error, _ in seen} <= allowed and {peer for _, peer in seen} == {victim}, seen
    limit_s = (0.0 if how == "kill" else DEADLINE_S) + GRACE_S
    last = max(outcome.at for outcome in outcomes.values()) - struck
    print(f"{layout}, {how}: ready after {ready - began:.1f} s, all raised after {last:.2f} s: {dict(seen)}")
    assert last < limit_s
