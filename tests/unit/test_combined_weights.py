"""Weights that are summed beside rows, against the oracle, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bits import bit_difference
from tests.cases import LAYOUTS, NO_CAPACITY, EngineSpec, make_case
from uccl_ep_train import Buffer, combine_weights
from uccl_ep_train.errors import DtypeError, RankMismatchError, ShapeError
from uccl_ep_train.oracle.reference import Routing

H, WIDTH = 256, 6


def weights_of(rank: int, num_rows: int) -> Tensor:
    """Of rows, each with many bits, so that another order of sums has another result."""
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(rank)) * 1.1


@pytest.mark.parametrize("layout", ["expert_major", "compact"])
@pytest.mark.parametrize("domains", ["1x4", "2x2", "3+1", "interleaved"])
def test_weights_are_summed_as_rows_are(domains: str, layout: str) -> None:
    spec = EngineSpec(domains=LAYOUTS[domains], num_experts=16, hidden=H)
    case = make_case(
        5, spec, num_tokens=(40, 0, 25, 33), hidden=H, dtype=torch.float32, dispatch_dtype="bf16", top_k=6,
        form="topk", focus="spread", weighted=False, special=False, layout=layout, expert_alignment=1,
        capacity=NO_CAPACITY, drop_rate=0.2,
    )  # fmt: skip

    def step(rank: int, buffer: Buffer) -> tuple[Tensor, Tensor]:
        given = case.inputs[rank].on(buffer.device)
        got = buffer.dispatch(given.x, given.topk_idx, dispatch_dtype="bf16", layout=layout)  # type: ignore[arg-type]
        assert isinstance(got.rows, Tensor)
        weights = weights_of(rank, len(got.rows)).to(buffer.device).requires_grad_()
        sums = combine_weights(buffer, weights, got.handle)
        assert not sums.requires_grad
        return sums.cpu(), buffer.combine(got.rows.detach(), got.handle).cpu()

    with spec.group() as group:
        seen = group.run(step)
    oracle = spec.oracle()
    routings = [Routing.from_topk(given.topk_idx, None, 16) for given in case.inputs]
    sent = oracle.dispatch([given.x for given in case.inputs], routings, dispatch_dtype="bf16", layout=layout)
    padded = [torch.nn.functional.pad(weights_of(r, len(rows)), (0, 122)) for r, rows in enumerate(sent.rows)]
    expected = oracle.combine(padded, sent.plan).outputs
    for (sums, rows), wanted, given in zip(seen, expected, case.inputs, strict=True):
        assert sums.shape == (len(given.x), WIDTH)
        assert not bit_difference(sums, wanted[:, :WIDTH].contiguous())
        assert rows.shape == given.x.shape
    # Negative control: of other rows the sums differ.
    others = [rows.flip(0) for rows in padded]
    assert any(
        bit_difference(sums, wanted[:, :WIDTH].contiguous())
        for (sums, _), wanted in zip(seen, oracle.combine(others, sent.plan).outputs, strict=True)
    )


def test_bad_weights_are_refused_and_the_next_call_works() -> None:
    spec = EngineSpec(domains=LAYOUTS["2x1"], num_experts=4, hidden=H)

    def step(rank: int, buffer: Buffer) -> None:
        idx = torch.arange(4, device=buffer.device).expand(3, 4).contiguous()
        got = buffer.dispatch(torch.ones(3, H, device=buffer.device).bfloat16(), idx)
        good = torch.ones(got.handle.num_rows, WIDTH, device=buffer.device)
        bad: list[tuple[Any, Any, type[Exception], str]] = [
            (good[1:], got.handle, ShapeError, r"allowed is \[12, W\] with W from 1 to 256"),
            (good[:, :0], got.handle, ShapeError, "with W from 1 to 256"),
            (good.new_ones(12, H + 1), got.handle, ShapeError, "with W from 1 to 256"),
            (good.bfloat16(), got.handle, DtypeError, "allowed is float32"),
            (None, got.handle, DtypeError, "weights is NoneType"),
            (good, None, DtypeError, "handle is NoneType"),
        ]
        for weights, handle, error, text in bad:
            with pytest.raises(error, match=text):
                combine_weights(buffer, weights, handle)
        assert torch.equal(combine_weights(buffer, good, got.handle), torch.full((3, WIDTH), 4.0))
        with pytest.raises(DtypeError, match="buffer is NoneType; allowed is a Buffer"):
            combine_weights(None, good, got.handle)  # type: ignore[arg-type]

    with spec.group() as group:
        group.run(step)


@pytest.mark.parametrize(("widths", "fits"), [((6, 9), True), ((6, 130), False)])
def test_ranks_that_give_other_widths(widths: tuple[int, int], fits: bool) -> None:
    """Up to the same multiple of 128 what a rank lacks is zero; else all ranks raise."""
    spec = EngineSpec(domains=LAYOUTS["2x1"], num_experts=4, hidden=H)

    def step(rank: int, buffer: Buffer) -> Tensor:
        idx = torch.arange(4, device=buffer.device).expand(3, 4).contiguous()
        got = buffer.dispatch(torch.ones(3, H, device=buffer.device).bfloat16(), idx)
        weights = torch.ones(got.handle.num_rows, widths[rank], device=buffer.device)
        return combine_weights(buffer, weights, got.handle).cpu()

    with spec.group() as group:
        outcomes = group.outcomes(step)
    if not fits:
        assert all(isinstance(outcome.error, RankMismatchError) for outcome in outcomes)
        return
    both, one = torch.full((3, 6), 4.0), torch.full((3, 3), 2.0)  # two experts of each rank
    assert torch.equal(outcomes[0].value, both)
    assert torch.equal(outcomes[1].value, torch.cat([both, one], 1))
