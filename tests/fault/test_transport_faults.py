"""What a network may do, and what it may not: lost traffic and endless refusals are errors on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.cases import LAYOUTS, EngineSpec, check_case, make_case
from tests.harness import Outcome, RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.errors import CommunicationError, PeerFailed, TransportError

pytestmark = pytest.mark.fault

T, H, E = 40, 256, 12
GRACE_S = 2.0


def spec_of(layout: str, **settings: Any) -> EngineSpec:
    return EngineSpec(domains=LAYOUTS[layout], num_experts=E, hidden=H, settings=tuple(settings.items()))


def dispatch(rank: int, buffer: Buffer) -> Any:
    topk_idx_TK = torch.arange(T * 2).reshape(T, 2) % E
    return buffer.dispatch(torch.ones(T, H, dtype=torch.bfloat16), topk_idx_TK)


def failures(outcomes: list[Outcome]) -> list[CommunicationError]:
    assert all(isinstance(outcome.error, CommunicationError) for outcome in outcomes), outcomes
    return [outcome.error for outcome in outcomes if isinstance(outcome.error, CommunicationError)]


@pytest.mark.parametrize("layout", ["2x2", "4x1", "3+1", "interleaved"])
def test_when_a_ranks_traffic_is_lost_every_rank_raises(layout: str) -> None:
    arrival_s, lost = 1.0, 3
    with spec_of(layout, loop_drop_peer=lost, arrival_timeout_s=arrival_s).group() as group:
        started = time.monotonic()
        outcomes = group.outcomes(dispatch)
        topology = group.buffer(0).topology
    for error in failures(outcomes):
        # One end of a way that leads over the lost rank: itself, or whose rows it would have relayed.
        ends = {error.rank, error.peer, topology.rail(error.peer, topology.domain_of[error.rank])}
        assert lost in ends, str(error)
    assert max(outcome.seconds for outcome in outcomes) < arrival_s + GRACE_S
    assert time.monotonic() - started < arrival_s + 2 * GRACE_S, "the lost rank delayed the teardown"


@pytest.mark.parametrize("layout", ["2x2", "4x1"])
def test_a_rank_that_leaves_alone_is_heard_though_datagrams_are_lost(layout: str) -> None:
    def act(rank: int, buffer: Buffer) -> Any:
        if rank == 1:
            buffer.close(abort=True)
            raise PeerFailed("it was I", rank=1)
        return dispatch(rank, buffer)

    with spec_of(layout, loop_loss_rate=0.3, loop_seed=9, arrival_timeout_s=30.0).group() as group:
        outcomes = group.outcomes(act)
    assert [(type(error), error.rank) for error in failures(outcomes)] == [(PeerFailed, 1)] * 4
    assert max(outcome.seconds for outcome in outcomes) < GRACE_S


def test_inside_a_domain_nothing_is_lost() -> None:
    """Control: the rank whose traffic is lost needs the network for other domains only."""
    with spec_of("1x4", loop_drop_peer=3, arrival_timeout_s=5.0).group() as group:
        check_case(group, make_case(1, spec_of("1x4")))


def test_refusals_beyond_the_deadline_are_an_error_on_every_rank() -> None:
    """A post is taken after 10,000 attempts on average: some post is not within the deadline."""
    kinds = set()
    for seed in range(1, 6):
        # Nobody but the proxy watches over a post before all have entered: that has another deadline.
        settings = {"loop_refuse_rate": 0.9999, "loop_seed": seed, "progress_timeout_s": 0.01}
        with spec_of("2x2", arrival_timeout_s=30.0, **settings).group() as group:
            outcomes = group.outcomes(lambda rank, buffer: [dispatch(rank, buffer) for _ in range(1000)])
        errors = failures(outcomes)
        assert max(outcome.seconds for outcome in outcomes) < 30.0
        kinds |= {type(error) for error in errors}
        assert all(error.peer >= 0 for error in errors), errors
    assert TransportError in kinds, kinds


FAULTS: dict[str, dict[str, Any]] = {
    "refusals": {"loop_refuse_rate": 0.95},
    "duplicates": {"loop_duplicate_rate": 1.0, "loop_seed": 5},
    "losses": {"loop_loss_rate": 0.5, "loop_seed": 8},
    "disorder": {"loop_seed": 6, "loop_latency_us": 300.0},
    "everything": {
        "loop_refuse_rate": 0.7, "loop_duplicate_rate": 0.7, "loop_seed": 7, "loop_latency_us": 100.0,
        "loop_gbytes_per_s": 0.05,
    },
}  # fmt: skip


def check_faults(group: RankGroup, spec: EngineSpec, seeds: range) -> None:
    for seed in seeds:
        check_case(group, make_case(seed, spec, max_tokens=60))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_network_may_do_changes_no_bit(fault: str, window: int) -> None:
    spec = spec_of("3x2", chunk_bytes=4096, window_chunks=window, **FAULTS[fault])
    with spec.group() as group:
        check_faults(group, spec, range(3))
        deadline = time.monotonic() + 30
        while True:
            stats = group.run(lambda rank, buffer: buffer.stats())
            repeated = sum(entry["messages.repeated"] for entry in stats)
            # A lost heartbeat is sent again after a quarter of a second.
            if "loop_loss_rate" not in FAULTS[fault] or repeated > 5 or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    if "loop_refuse_rate" in FAULTS[fault]:
        assert sum(entry["proxy.refused_posts"] for entry in stats) > 100
    if "loop_duplicate_rate" in FAULTS[fault]:
        assert sum(entry["proxy.duplicates_dropped"] for entry in stats) > 100
    if "loop_loss_rate" in FAULTS[fault]:
        assert repeated > 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["2x2", "4x1", "3x2", "3+1", "interleaved"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_network_may_do_changes_no_bit_in_any_layout(fault: str, layout: str) -> None:
    for window in (1, 2, 5):
        spec = spec_of(layout, chunk_bytes=4096, window_chunks=window, **FAULTS[fault])
        with spec.group() as group:
            check_faults(group, spec, range(10, 20))
