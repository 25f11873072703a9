"""What a failed operation leaves behind: outputs of nothing but NaN, no gradient, a lasting error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.errors import CommunicationError, PeerFailed

pytestmark = pytest.mark.fault

T, H, K, E = 30, 128, 2, 8
LEAVER = 3
SETTINGS: dict[str, Any] = {"num_experts": E, "hidden": H, "dispatch_dtype": "bf16", "budget_bytes": 8 << 20}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(T, H, dtype=dtype), torch.arange(T * K).reshape(T, K) % E, torch.ones(T, K)


def outputs_after(buffer: Buffer, launch: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """What `launch` returns, and the tensors that the engine reads and (the last) writes for it."""
    in_flight = buffer._in_flight
    records = []

    def add(*arguments: Any) -> Any:
        records.append(type(in_flight).add(in_flight, *arguments))
        return records[-1]

    in_flight.add = add  # type: ignore[method-assign]
    try:
        return launch(), list(records[-1]._tensors)
    finally:
        del in_flight.add


def launch_dispatch(buffer: Buffer, dtype: torch.dtype, result: Any) -> tuple[Any, list[Tensor]]:
    x_TH, _, weights_TK = inputs(dtype)
    pending, tensors = outputs_after(
        buffer, lambda: buffer.dispatch_async(x_TH, inputs(dtype)[1], weights_TK, handle=result.handle)
    )
    written = tensors[-2:]
    assert [entry.shape for entry in written] == [result.rows.shape, result.row_weights.shape]
    return pending, written


def launch_combine(buffer: Buffer, dtype: torch.dtype, result: Any) -> tuple[Any, list[Tensor]]:
    pending, tensors = outputs_after(buffer, lambda: buffer.combine_async(result.rows, result.handle))
    written = tensors[-1:]
    assert written[0].shape == (T, H) and written[0].dtype == dtype
    return pending, written


@pytest.mark.parametrize("domain_size", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("launch", [launch_dispatch, launch_combine])
def test_outputs_of_a_failed_operation_are_nan(
    launch: Callable[..., tuple[Any, list[Tensor]]], dtype: torch.dtype, domain_size: int
) -> None:
    launched = threading.Barrier(4)

    def step(rank: int, buffer: Buffer) -> None:
        result = buffer.dispatch(*inputs(dtype))
        if rank == LEAVER:
            launched.wait(30)
            buffer.close(abort=True)
            return
        pending, written = launch(buffer, dtype, result)
        for tensor in written:
            tensor.zero_()
        launched.wait(30)
        with pytest.raises(PeerFailed):
            pending.wait()
        assert all(tensor.isnan().all() for tensor in written)
        # What went in is not touched.
        assert result.rows.eq(1).all()

    with RankGroup(4, SETTINGS | {"domain_size": domain_size}) as group:
        group.run(step)
        group.broken = True


def test_codes_scales_and_experts_of_a_failed_dispatch_are_nan_and_none() -> None:
    launched = threading.Barrier(4)

    def step(rank: int, buffer: Buffer) -> None:
        x_TH, topk_idx_TK, weights_TK = inputs(torch.bfloat16)
        kinds: dict[str, Any] = {"layout": "compact", "dispatch_dtype": "fp8", "output_dtype": "fp8"}
        handle = buffer.dispatch(x_TH, topk_idx_TK, weights_TK, **kinds).handle
        if rank == LEAVER:
            launched.wait(30)
            buffer.close(abort=True)
            return
        cached = {"handle": handle, "dispatch_dtype": "fp8", "output_dtype": "fp8"}
        metadata = torch.ones(len(x_TH), 2, dtype=torch.int32)
        pending, tensors = outputs_after(
            buffer, lambda: buffer.dispatch_async(x_TH, topk_weights=weights_TK, metadata=metadata, **cached)
        )
        codes, scales, weights, experts, words = tensors[-5:]
        launched.wait(30)
        with pytest.raises(PeerFailed):
            pending.wait()
        assert len(codes) > 0 and codes.float().isnan().all()
        assert scales.isnan().all() and weights.isnan().all() and experts.eq(-1).all()
        assert words.shape[1] == 2 and words.eq(-1).all()

    with RankGroup(4, SETTINGS | {"domain_size": 2}) as group:
        group.run(step)
        group.broken = True


def test_outputs_of_an_operation_that_succeeds_are_not() -> None:
    """Control, through the same launches."""

    def step(rank: int, buffer: Buffer) -> None:
        for dtype in (torch.bfloat16, torch.float32):
            result = buffer.dispatch(*inputs(dtype))
            for launch, value in ((launch_dispatch, 1.0), (launch_combine, float(K))):
                pending, written = launch(buffer, dtype, result)
                pending.wait()
                assert written[0].eq(value).all()

    with RankGroup(4, SETTINGS | {"domain_size": 2}) as group:
        group.run(step)


def test_a_backward_that_fails_leaves_no_gradient() -> None:
    forward_done = threading.Barrier(4)

    def step(rank: int, buffer: Buffer) -> None:
        x_TH, topk_idx_TK, weights_TK = inputs(torch.float32)
        x_TH.requires_grad_()
        weights_TK.requires_grad_()
        result = buffer.dispatch(x_TH, topk_idx_TK, weights_TK)
        out_TH = buffer.combine(result.rows * result.row_weights[:, None], result.handle)
        forward_done.wait(30)
        if rank == LEAVER:
            buffer.close(abort=True)
            return
        with pytest.raises(CommunicationError):
            out_TH.sum().backward()
        assert x_TH.grad is None and weights_TK.grad is None
        with pytest.raises(CommunicationError):
            torch.optim.SGD([x_TH], lr=1.0).step()
        assert x_TH.eq(1).all()

    with RankGroup(4, SETTINGS | {"domain_size": 2}) as group:
        group.run(step)
        group.broken = True
