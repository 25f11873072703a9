"""Ranks of the benchmarks that share a GPU: how they start together, and what they refuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import lineup, proxy_load, ranks
from bench.lineup import Lineup
from bench.measure import Recorder, reserve_gpu_memory
from bench.options import parse_args
from bench.ranks import DispatchMeeting
from bench.systems import Sample
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import EpConfig

LATE_S = 0.4


def come_late(rank: Rank) -> tuple[float, float]:
    """When this rank came to the second meeting, and when it left."""
    meet = DispatchMeeting()
    meet()
    time.sleep(LATE_S * rank.rank)
    came = time.monotonic()
    meet()
    left = time.monotonic()
    meet.close()
    return came, left


def test_nobody_leaves_a_meeting_before_all_have_come() -> None:
    with ProcessRanks(2, come_late) as processes:
        outcomes = processes.outcomes(timeout_s=30)
    assert not any(outcome.error for outcome in outcomes.values()), outcomes
    came, left = zip(*(outcome.value for outcome in outcomes.values()), strict=True)
    assert came[1] - came[0] > LATE_S / 2
    assert min(left) > max(came)


def test_what_ranks_do_to_start_together_is_no_processor_time_of_a_system() -> None:
    ran: list[str] = []
    traffic: Any = SimpleNamespace(logical_bytes=lambda: 0)
    system: Any = SimpleNamespace(
        ops=("dispatch",), bind=lambda _: None, run=ran.append, check=lambda: None, step_seconds=dict,
        num_windows=lambda: 0.0, wire_bytes=lambda *_: (0, 0),
    )  # fmt: skip

    def timed(call: Callable[[], None]) -> float:
        begin = time.process_time()
        while time.process_time() - begin < 0.05:
            pass
        call()
        return 0.0

    recorder = Recorder(system, timed)
    recorder.run(Sample(torch.empty(0), torch.empty(0), torch.empty(0), traffic), counted=True)
    assert ran == ["dispatch"] and recorder._cpu["dispatch"][0] < 0.02e6


@pytest.fixture
def one_gpu_of_four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lineup, ranks):
        monkeypatch.setattr(module, "lacks_nccl", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.usefixtures("one_gpu_of_four_ranks")
def test_kernels_that_wait_for_each_other_have_to_fit_on_the_gpu() -> None:
    def refusal(**sms: int) -> str:
        return ranks.too_many_sms(EpConfig(num_experts=8, hidden=128, **sms))

    assert refusal(num_sms=33) == refusal(num_sms=24, stage_sms=33) == ""
    assert refusal(num_sms=34) == "not with --share-gpus: 4 ranks take 136 SMs of 132"
    assert "400 SMs" in refusal(num_sms=24, stage_sms=100)


@pytest.mark.usefixtures("one_gpu_of_four_ranks")
def test_peers_are_refused_where_there_is_no_nccl() -> None:
    case: Any = None
    asked = Lineup(case)
    asked.add("a peer", lambda: pytest.fail("made"))
    assert asked.refused == {"a peer": "not with --share-gpus: needs NCCL"}
    assert not asked.systems


@pytest.mark.parametrize(("all_ranks", "gib"), [(1, 16), (2, 16), (4, 8), (8, 4), (9, 3.2)])
def test_ranks_of_a_gpu_reserve_at_most_a_quarter_of_it(
    all_ranks: int, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two GPUs of 64 GiB, of which other ranks may have taken their part."""
    taken: list[int] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(all_ranks))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 64 << 30))
    monkeypatch.setattr(torch, "empty", lambda num_bytes, **_: taken.append(num_bytes))
    reserve_gpu_memory()
    assert taken == [int(gib * 2**30)]


def test_a_peer_of_another_version_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineup, "lacks_nccl", lambda: False)
    monkeypatch.setattr(lineup, "agree", lambda reason: reason)
    case: Any = None
    asked = Lineup(case)
    asked.add("older", lambda: case.proxies)
    asked.add("newer", lambda: case())
    assert asked.refused == {
        "older": "AttributeError: 'NoneType' object has no attribute 'proxies'",
        "newer": "TypeError: 'NoneType' object is not callable",
    }
    with pytest.raises(ZeroDivisionError):  # a fault of ours ends the benchmark
        asked.add("broken", lambda: case or 1 // 0)


@pytest.mark.parametrize("parse", [parse_args, proxy_load.main])
def test_gpus_to_share_have_to_be_there(
    parse: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        parse(["--share-gpus"])
    assert "--share-gpus: torch sees no GPU" in capsys.readouterr().err
