"""Who comes late is waited for; who never comes is named; a slow network is not a silent one."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.cases import LAYOUTS, EngineSpec, check_case, make_case
from uccl_ep_train import Buffer
from uccl_ep_train.errors import ArrivalTimeout, CommunicationError, PeerFailed, ProgressTimeout

pytestmark = pytest.mark.fault

T, H, K, E = 40, 256, 2, 8
GRACE_S = 2.0


def spec_of(layout: str, **settings: Any) -> EngineSpec:
    return EngineSpec(domains=LAYOUTS[layout], num_experts=E, hidden=H, settings=tuple(settings.items()))


def dispatch(buffer: Buffer, handle: Any = None) -> Any:
    x_TH = torch.ones(T, H, dtype=torch.bfloat16)
    if handle is not None:
        return buffer.dispatch(x_TH, handle=handle)
    topk_idx_TK = torch.arange(T * K).reshape(T, K) % E
    return buffer.dispatch(x_TH, topk_idx_TK)


def combine(buffer: Buffer, handle: Any) -> Any:
    return buffer.combine(torch.ones(handle.num_rows, H, dtype=torch.bfloat16), handle)


def error_of(buffer: Buffer) -> CommunicationError | None:
    try:
        buffer.check()
    except CommunicationError as error:
        return error
    return None


CALLS = {"dispatch": lambda buffer, handle: dispatch(buffer), "cached dispatch": dispatch, "combine": combine}


@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1", "3+1"])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_never_enters_is_named_by_all(call: str, layout: str, absent: int) -> None:
    arrival_s = 0.5
    with spec_of(layout, arrival_timeout_s=arrival_s, progress_timeout_s=60.0).group() as group:
        handles = group.run(lambda rank, buffer: dispatch(buffer).handle)
        others_raised = threading.Barrier(4)

        def step(rank: int, buffer: Buffer) -> float:
            started = time.monotonic()
            if rank == absent:
                others_raised.wait(30)
                # Told by the others, who do not know whether it will ever call.
                while time.monotonic() - started < arrival_s + GRACE_S and error_of(buffer) is None:
                    time.sleep(0.01)
                with pytest.raises(ArrivalTimeout, match=f"rank {absent} to enter"):
                    CALLS[call](buffer, handles[rank])
                return arrival_s
            with pytest.raises(
                ArrivalTimeout,
                match=rf"^look first at rank {absent} .*: call \d+ on .*rank {absent} to enter",
            ) as caught:
                CALLS[call](buffer, handles[rank])
            seconds = time.monotonic() - started
            assert caught.value.peer == absent and caught.value.step == "exchange" and caught.value.epoch == 2
            others_raised.wait(30)
            return seconds

        times = group.run(step)
        group.broken = True
        # The first that entered waited for the whole deadline and told those that had come a little later.
        assert arrival_s <= max(times) < arrival_s + GRACE_S, times


@pytest.mark.parametrize("layout", ["1x4", "2x2"])
@pytest.mark.parametrize("call", CALLS)
def test_a_late_rank_is_waited_for_longer_than_the_progress_deadline(call: str, layout: str) -> None:
    late_s, progress_s = 1.5, 0.75
    with spec_of(layout, arrival_timeout_s=60.0, progress_timeout_s=progress_s).group() as group:
        handles = group.run(lambda rank, buffer: dispatch(buffer).handle)

        def step(rank: int, buffer: Buffer) -> tuple[float, float]:
            if rank == 1:
                time.sleep(late_s)
            called = time.monotonic()
            CALLS[call](buffer, handles[rank])
            return called, time.monotonic()

        # The last calls are for the close: within the progress deadline all are there.
        times = group.run(step)
        late = times[1][0]
        assert all(returned >= late for _, returned in times), times
        assert late - max(called for called, _ in times[:1] + times[2:]) > progress_s, times


def test_a_network_that_is_slow_but_moves_is_waited_for() -> None:
    """Every round trip is short against the progress deadline, the operation long."""
    settings = {"chunk_bytes": 2048, "window_chunks": 1, "loop_latency_us": 20_000.0}
    spec = spec_of("2x2", arrival_timeout_s=60.0, progress_timeout_s=0.5, **settings)
    spread = {"form": "topk", "top_k": 2, "focus": "spread", "drop_rate": 0.0}
    case = make_case(1, spec, num_tokens=[40, 0, 30, 0], hidden=H, **spread)
    with spec.group() as group:
        started = time.monotonic()
        check_case(group, case)
        assert time.monotonic() - started > 2 * 0.5


def test_a_network_that_is_slower_than_the_deadline_is_an_error() -> None:
    """Control of the test above: with round trips beyond the deadline an operation fails on all ranks."""
    latency_s, progress_s = 1.0, 0.3
    settings = {"chunk_bytes": 2048, "window_chunks": 1, "loop_latency_us": latency_s * 1e6}
    spec = spec_of("2x2", arrival_timeout_s=60.0, progress_timeout_s=progress_s, **settings)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> float:
            with pytest.raises(ProgressTimeout) as caught:
                dispatch(buffer)
            assert caught.value.step in ("plan", "ship", "place")
            return time.monotonic()

        raised = group.run(step)
        group.broken = True
        assert max(raised) - min(raised) < latency_s + GRACE_S


def test_the_cause_is_waited_for_when_a_rank_has_closed() -> None:
    """A rank that an error has reached closes its buffer; others may see that before they see the error."""

    def step(rank: int, buffer: Buffer) -> None:
        if rank == 0:
            dispatch(buffer)
        elif rank == 1:
            time.sleep(1.2)  # long after rank 0 has begun to wait
            buffer._engine.close()
        else:
            time.sleep(1.5)
            buffer._engine.fail("the cause")
            buffer._engine.close(abort=True)

    settings = (("progress_timeout_s", 3.0), ("dispatch_dtype", "bf16"))
    spec = EngineSpec(domains=(0, 1, 2), num_experts=9, hidden=H, settings=settings)
    with spec.group() as group:
        outcome = group.outcomes(step)[0]
    assert isinstance(outcome.error, PeerFailed) and outcome.error.peer == 2, outcome
    assert "the cause" in str(outcome.error) and outcome.seconds < 1.5 + GRACE_S
