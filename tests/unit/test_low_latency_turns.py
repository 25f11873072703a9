"""Low latency: sending apart from receiving, calls that are refused or differ, and ranks that do not come."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bits import bit_difference
from tests.cases import EngineSpec
from tests.low_latency import SPECS, E, give, settle, slot_differences, told
from uccl_ep_train import Buffer
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.common.slots import SlotStatistics
from uccl_ep_train.errors import ArrivalTimeout, InputError, PeerFailed, RankMismatchError

LAYOUTS = {name: spec for name, spec in SPECS.items() if name != "1x1"}
LAYOUTS["1x2"] = replace(SPECS["2x1"], domains=(0, 0))


def spec_of(*settings: tuple[str, Any], layout: str = "1x2") -> EngineSpec:
    spec = LAYOUTS[layout]
    return replace(spec, settings=(*spec.settings, *settings))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_only_sends_waits_for_nobody(layout: str, early: bool) -> None:
    """And may overwrite what it gave. early: the dispatch has the weights."""
    spec = spec_of(layout=layout)
    given = give(spec)
    rows, wanted = given.sent(), given.sums(spec)
    sent = [threading.Event(), threading.Event()]
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls = LowLatency(buffer)
            x, topk_idx, weights, outputs = (of.clone() for of in given.on(rank, buffer.device))
            routing = topk_idx.clone(), weights.clone()
            assert rank == 0 or sent[0].wait(30)
            under_way = calls.send_dispatch(x, topk_idx, weights if early else None, wire="bf16")
            x.zero_()
            if not early:
                topk_idx.zero_()
            sent[0].set()
            got = under_way.receive()
            assert not slot_differences(got, rows[rank])
            assert rank == 0 or sent[1].wait(30)
            sums = calls.send_combine(outputs, *told(early, *routing), got.handle)
            outputs.zero_()
            if not early:
                for told_late in routing:
                    told_late.zero_()
            sent[1].set()
            assert not bit_difference(sums.receive().cpu(), wanted[rank])

        group.run(step)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_of_a_kind_are_sent_before_the_first_is_received(layout: str, early: bool) -> None:
    """early: dispatches have the weights, so that combines that only send add before."""
    spec = spec_of(("low_latency_fold_pairs", 0), layout=layout)
    worlds = [give(spec, seed=seed) for seed in range(2)]
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, inputs = LowLatency(buffer), [given.on(rank, buffer.device) for given in worlds]
            sent = [
                calls.send_dispatch(x, topk_idx, weights if early else None, wire="bf16")
                for x, topk_idx, weights, _ in inputs
            ]
            got = [entry.receive() for entry in sent]
            sums = [
                calls.send_combine(outputs, *told(early, topk_idx, weights), rows.handle)
                for rows, (_, topk_idx, weights, outputs) in zip(got, inputs, strict=True)
            ]
            for given, rows, out in zip(worlds, got, [entry.receive() for entry in sums], strict=True):
                assert not slot_differences(rows, given.sent()[rank])
                assert not bit_difference(out.cpu(), given.sums(spec)[rank])

        group.run(step)


@pytest.mark.parametrize("layout", ["1x2", "2x1"])
@pytest.mark.parametrize("mask_timeout_s", [None, 20.0])
def test_sums_are_the_same_whether_a_rank_adds_before_it_sends_or_not(
    mask_timeout_s: float | None, layout: str
) -> None:
    """Launches that only send do not, and those of ranks that may be masked."""
    settings = (("mask_timeout_s", mask_timeout_s),) if mask_timeout_s else ()
    spec = spec_of(("low_latency_fold_pairs", 0), *settings, layout=layout)
    given = give(spec, "all to one expert")
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, (x, topk_idx, weights, outputs) = LowLatency(buffer), given.on(rank, buffer.device)
            handle = calls.dispatch(x, topk_idx, wire="bf16").handle
            dropped = topk_idx.clone()
            dropped[::2, 1] = dropped[1::3, 4] = -1
            kept = (topk_idx, dropped)
            sums = []
            for call in range(8):
                if call // 2 % 4 in (0, 2 - rank):
                    out = calls.combine(outputs, kept[call % 2], weights, handle)
                else:
                    out = calls.send_combine(outputs, kept[call % 2], weights, handle).receive()
                sums.append(out)
            settle(buffer)
            assert not bit_difference(sums[0].cpu(), given.sums(spec)[rank])
            assert bit_difference(sums[0].cpu(), sums[1].cpu()) or not len(x)
            assert not any(bit_difference(out.cpu(), sums[call % 2].cpu()) for call, out in enumerate(sums))

        group.run(step)


@pytest.mark.parametrize("layout", ["1x2", "2x1"])
def test_who_is_ahead_sends_before_others_have_received(layout: str) -> None:
    """Rank 1 receives its first two when rank 0 has sent its third."""
    spec = spec_of(layout=layout)
    worlds = [give(spec, seed=seed) for seed in range(3)]
    sent_third = threading.Event()
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, inputs = LowLatency(buffer), [given.on(rank, buffer.device) for given in worlds]

            def send(number: int) -> Any:
                x, topk_idx, weights, _ = inputs[number]
                return calls.send_dispatch(x, topk_idx, weights, wire="bf16")

            def receive(sent: Any, number: int) -> None:
                assert not slot_differences(sent.receive(), worlds[number].sent()[rank])

            first, second = send(0), send(1)
            if rank == 1:
                assert sent_third.wait(30)
                receive(first, 0)
                receive(second, 1)
                receive(send(2), 2)
                return
            receive(first, 0)
            receive(second, 1)
            third = send(2)
            sent_third.set()
            receive(third, 2)

        group.run(step)


def test_what_is_out_of_turn_is_refused_and_changes_nothing() -> None:
    spec = spec_of()
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, (x, topk_idx, *_) = LowLatency(buffer), given.on(rank, buffer.device)
            first, second = (calls.send_dispatch(x, topk_idx, wire="bf16") for _ in range(2))
            for call in (calls.send_dispatch, calls.dispatch):
                with pytest.raises(InputError, match="2 dispatches were sent and not received; allowed are"):
                    call(x, topk_idx)
            with pytest.raises(InputError, match="allowed is that order"):
                second.receive()
            for sent in (first, second):
                assert not slot_differences(sent.receive(), given.sent()[rank])
            with pytest.raises(InputError, match="allowed is one receive"):
                second.receive()
            settle(buffer)

        group.run(step)


@pytest.mark.parametrize("early", [False, True])
def test_what_a_rank_never_receives_is_forgotten(early: bool) -> None:
    """The other one has everything, and the group closes as ever."""
    spec = spec_of()
    given = give(spec)
    rows, wanted = given.sent(), given.sums(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, (x, topk_idx, weights, outputs) = LowLatency(buffer), given.on(rank, buffer.device)
            got = calls.dispatch(x, topk_idx, weights if early else None, wire="bf16")
            combine = calls.send_combine(outputs, *told(early, topk_idx, weights), got.handle)
            dispatch = calls.send_dispatch(x, topk_idx, wire="bf16")
            if rank == 0:
                assert not slot_differences(dispatch.receive(), rows[rank])
                assert not bit_difference(combine.receive().cpu(), wanted[rank])
                settle(buffer)

        group.run(step)


def test_statistics_are_added_to() -> None:
    spec = spec_of()
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, (x, topk_idx, *_) = LowLatency(buffer), given.on(rank, buffer.device)
            counts = torch.zeros(E // 2, dtype=torch.int32, device=buffer.device)
            waited = torch.zeros(2, dtype=torch.int64, device=buffer.device)
            for _ in range(3):
                got = calls.dispatch(x, topk_idx, statistics=SlotStatistics(counts, waited))
            assert torch.equal(counts, 3 * got.counts)
            assert 0 < int(waited.sum()) < 10**10

        group.run(step)


def test_all_that_are_made_of_a_buffer_take_turns() -> None:
    """On a GPU a kernel receives what was sent first, whoever sent it. Control: in order it works."""
    spec = spec_of()
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, others = LowLatency(buffer), LowLatency(buffer)
            x, topk_idx, weights, outputs = given.on(rank, buffer.device)
            handle = calls.dispatch(x, topk_idx).handle
            first, second = calls.send_dispatch(x, topk_idx), others.send_dispatch(x, topk_idx)
            for refused in (calls.dispatch, others.dispatch, calls.send_dispatch, others.send_dispatch):
                with pytest.raises(InputError, match="2 dispatches were sent and not received"):
                    refused(x, topk_idx)
            with pytest.raises(InputError, match="rows that were sent before these are not received"):
                second.receive()
            first.receive()
            second.receive()
            sums = calls.send_combine(outputs, topk_idx, weights, handle)
            with pytest.raises(InputError, match="1 combines were sent and not received"):
                others.combine(outputs, topk_idx, weights, handle)
            sums.receive()
            settle(buffer)

        group.run(step)


def test_other_calls_are_a_mismatch_that_names_both() -> None:
    spec = spec_of()
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> str:
            calls, (x, topk_idx, *_) = LowLatency(buffer), given.on(rank, buffer.device)
            with pytest.raises(RankMismatchError) as caught:
                for _ in range(2):
                    calls.dispatch(x, topk_idx, wire="fp8" if rank else "bf16")
                    settle(buffer)
            return str(caught.value)

        for text in group.run(step):
            assert "low-latency dispatch(bf16 as fp8" in text and "low-latency dispatch(bf16 as bf16" in text


def test_a_rank_that_does_not_come_is_an_error_within_the_deadline() -> None:
    spec = spec_of(("arrival_timeout_s", 2.0))
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, (x, topk_idx, *_) = LowLatency(buffer), given.on(rank, buffer.device)
            if rank == 0:
                with pytest.raises(ArrivalTimeout, match="rank 1 to enter"):
                    calls.dispatch(x, topk_idx)
                    settle(buffer)

        group.run(step)


def test_a_rank_that_does_not_come_is_masked_where_that_is_allowed() -> None:
    """It has an error when it comes; the other one goes on without it."""
    spec = spec_of(("mask_timeout_s", 1.0))
    given = give(spec)
    others_went_on = threading.Event()
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, (x, topk_idx, *_) = LowLatency(buffer), given.on(rank, buffer.device)
            if rank == 1:
                others_went_on.wait(30)
                with pytest.raises(PeerFailed, match="rank 1 was masked"):
                    calls.dispatch(x, topk_idx, wire="bf16")
                    settle(buffer)
                return
            for _ in range(3):
                got = calls.dispatch(x, topk_idx, wire="bf16")
                settle(buffer)
                assert calls.masked_ranks().tolist() == [0, 1]
                ours = (topk_idx < E // 2) & (topk_idx >= 0)
                assert int(got.counts.sum()) == int(ours.sum())
            others_went_on.set()

        group.run(step)


def test_operations_have_a_lane_of_a_trace(tmp_path: Path) -> None:
    spec = spec_of(layout="2x1")
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls, (x, topk_idx, weights, outputs) = LowLatency(buffer), given.on(rank, buffer.device)
            with buffer.trace(tmp_path / "run"):
                got = calls.dispatch(x, topk_idx, wire="bf16")
                calls.combine(outputs, topk_idx, weights, got.handle)
                settle(buffer)

        group.run(step)
    for path in sorted(tmp_path.glob("run.rank*.json")):
        events = json.loads(path.read_text())["traceEvents"]
        seen = [
            event["name"]
            for event in events
            if event["name"].startswith("low-latency") and event["ph"] == "X"
        ]
        assert seen == ["low-latency dispatch", "low-latency combine"]
