"""Several domains on GPUs when a rank dies or sleeps, when chunks are lost, and what a buffer refuses."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.cases import LAYOUTS, EngineSpec
from tests.fault.test_survivors import Plot, play
from tests.gpu.domain_ranks import NEEDS_GPU, SETTINGS, DomainRanks, Seat, check, spec_of
from tests.gpu.test_cuda_faults import strike, use
from tests.harness import RankGroup
from uccl_ep_train import Topology
from uccl_ep_train.errors import CommunicationError, ConfigError, ErrorFields

pytestmark = [*NEEDS_GPU, pytest.mark.fault]

ARRIVAL_S, PROGRESS_S, GRACE_S = 8.0, 5.0, 2.0
DEADLINES = {"PeerDied": PROGRESS_S, "ProgressTimeout": PROGRESS_S, "ArrivalTimeout": ARRIVAL_S}


def of_layout(layout: str) -> dict[str, Any]:
    domains = LAYOUTS[layout]
    return {
        "domains": domains, "num_experts": 2 * len(domains), "num_sms": 8, "budget_bytes": 128 << 20,
        "arrival_timeout_s": ARRIVAL_S, "progress_timeout_s": PROGRESS_S,
    }  # fmt: skip


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("layout", ["2x1", "2x2", "3+1"])
def test_the_others_raise_in_time_and_name_the_rank(layout: str, how: str) -> None:
    """The victim is in another domain than rank 0; in 3+1 it lands and relays for all ranks of the other."""
    num_ranks = len(LAYOUTS[layout])
    for error, seconds in strike(num_ranks, num_ranks - 1, how, of_layout(layout)):
        assert error in DEADLINES and (how == "freeze" or error == "PeerDied"), error
        assert seconds < DEADLINES[error] + GRACE_S, (error, seconds)


# ------------------------------------------------------------------------------------- what is lost


def lose(seat: Seat, config: dict[str, Any]) -> tuple[str, ErrorFields, float]:
    """Class and fields of the error, and seconds until it was raised."""
    buffer = seat.buffer(config)
    started = time.monotonic()
    try:
        while True:
            use(buffer)
    except CommunicationError as error:
        return type(error).__name__, error.fields(), time.monotonic() - started
    finally:
        buffer.close()


@pytest.mark.parametrize("layout", ["2x1", "2x2", "4x1", "interleaved"])
def test_a_chunk_that_never_comes_is_an_error_on_every_rank(domain_ranks: DomainRanks, layout: str) -> None:
    lost = len(LAYOUTS[layout]) - 1
    spec, topology = spec_of(layout), Topology.from_domains(list(LAYOUTS[layout]))
    config = of_layout(layout) | {"hidden": 1024, "loop_drop_peer": lost, "arrival_timeout_s": 3.0}
    for error, fields, seconds in domain_ranks.run(spec.num_ranks, lose, config):
        assert error in ("ArrivalTimeout", "ProgressTimeout", "TransportError"), error
        assert seconds < 3.0 + GRACE_S, seconds
        assert fields["rank"] >= 0 and fields["peer"] >= 0 and fields["epoch"] >= 0, fields
        assert fields["step"] in ("exchange", "ship", "place") and isinstance(fields["chunk"], int), fields
        # One end of a way that leads over the lost rank: itself, or whose rows it would have relayed.
        rail = topology.rail(fields["peer"], topology.domain_of[fields["rank"]])
        assert lost in (fields["rank"], fields["peer"], rail), fields
    # The same processes, without the loss.
    check(domain_ranks, spec, range(2), max_tokens=80)


# ------------------------------------------------------------------------------------ who goes on

ON_GPUS = (("backend", "cuda"), ("budget_bytes", 128 << 20), ("num_sms", 8))


@pytest.mark.timeout(120)
def test_a_thawed_rank_raises_and_a_thousand_operations_of_the_others_stay_exact() -> None:
    """Three domains of one rank: with two GPUs the survivors need not take turns on one.

    250 rounds of theirs ended before the thawed rank had said its last words.
    """
    play(Plot(victim=2, rounds=1000, thaw_at=25, keeps_old=False, domains=(0, 1, 2), settings=ON_GPUS))


@pytest.mark.timeout(120)
def test_after_a_death_the_others_go_on_with_a_new_buffer() -> None:
    play(Plot(victim=2, rounds=10, thaw_at=-1, keeps_old=True, domains=(0, 1, 2), settings=ON_GPUS))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("keeps_old", [False, True])
@pytest.mark.parametrize("victim", range(4))
def test_whoever_it_was_and_whether_or_not_the_old_buffers_are_closed(victim: int, keeps_old: bool) -> None:
    play(Plot(victim, rounds=60, thaw_at=15, keeps_old=keeps_old, settings=ON_GPUS))


# --------------------------------------------------------------------------------- what is refused


def refusal(num_ranks: int, config: dict[str, Any]) -> ConfigError:
    """What every rank is told instead of a buffer; ranks are threads, since no kernel runs."""
    with pytest.raises(BaseExceptionGroup) as caught, RankGroup(num_ranks, SETTINGS | config):
        pass
    errors = [error for error in caught.value.exceptions if isinstance(error, ConfigError)]
    assert errors, caught.value.exceptions
    return errors[0]


def test_one_sm_is_refused_where_there_are_two_domains() -> None:
    config: dict[str, Any] = {"num_experts": 4, "hidden": 256, "num_sms": 1}
    assert "num_sms = 1" in str(refusal(2, config | {"domains": (0, 1)}))


def test_one_sm_is_enough_for_one_domain(domain_ranks: DomainRanks) -> None:
    """Control: there is no block for the network."""
    check(domain_ranks, EngineSpec(domains=(0,), settings=(("num_sms", 1),)), range(2))


def test_a_domain_of_more_ranks_than_kernels_know_is_refused() -> None:
    error = refusal(129, {"num_experts": 129, "hidden": 128, "domains": (0,) * 129})
    assert "129 ranks in a domain" in str(error) and "at most 128" in str(error)


def call_badly_then_well(seat: Seat, config: dict[str, Any]) -> bool:
    with seat.buffer(config) as buffer:
        with pytest.raises(ValueError):
            buffer.dispatch(torch.ones(4, 100, dtype=torch.bfloat16, device=buffer.device))
        use(buffer)
    return True


def test_a_buffer_is_usable_after_a_call_that_was_refused(domain_ranks: DomainRanks) -> None:
    check(domain_ranks, spec_of("2x1"), range(1))
    assert domain_ranks.run(2, call_badly_then_well, of_layout("2x1") | {"hidden": 1024}) == [True, True]
