"""Ranks that do different things: one typed error that names both, on every rank, at once and for good."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import LAYOUTS, EngineSpec, check_case, make_case
from tests.harness import RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.errors import PlanMismatchError, RankMismatchError, TopologyError

T, H, K, E = 6, 256, 2, 8
DEVIANT = 2
PROMPTLY_S = 10.0  # far below the deadlines of the harness: nobody may have waited for one


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def topk(*changes: tuple[int, int, int]) -> torch.Tensor:
    """Two experts a token, the same ones for all; (token, column, expert) for what differs."""
    topk_idx_TK = torch.tensor([[0, 5]]).repeat(T, 1)
    for token, column, expert in changes:
        topk_idx_TK[token, column] = expert
    return topk_idx_TK


def spec_of(layout: str) -> EngineSpec:
    return EngineSpec(domains=LAYOUTS[layout], num_experts=E, hidden=H)


Call = Callable[[Buffer, Any], Any]


def dispatch(buffer: Buffer, _: Any, /, **changes: Any) -> Any:
    return buffer.dispatch(**{"x": bf16(T, H), "topk_idx": topk(), **changes})


def combine(buffer: Buffer, handle: Any, dtype: torch.dtype = torch.bfloat16, hidden: int = H) -> Any:
    return buffer.combine(torch.zeros(handle.num_rows, hidden, dtype=dtype), handle)


CODES = torch.zeros(T, H).to(torch.float8_e4m3fn)

# what differs: (what the others call, what one rank calls, what the message says of its call)
DEVIATIONS: dict[str, tuple[Call, Call, str]] = {
    "dtype": (dispatch, lambda b, h: dispatch(b, h, x=torch.zeros(T, H), dispatch_dtype="bf16"), "fp32"),
    "wire": (dispatch, lambda b, h: dispatch(b, h, dispatch_dtype="bf16"), "as bf16"),
    "hidden size": (dispatch, lambda b, h: dispatch(b, h, x=bf16(T, 128)), "128"),
    "operation": (dispatch, combine, "combine"),
    "weights": (dispatch, lambda b, h: dispatch(b, h, topk_weights=torch.ones(T, K)), "weights"),
    "cached or not": (dispatch, lambda b, h: dispatch(b, h, topk_idx=None, handle=h), "plan"),
    "layout": (dispatch, lambda b, h: dispatch(b, h, layout="compact"), "compact rows of 2 weights"),
    "width of compact rows": (
        lambda b, h: dispatch(b, h, layout="compact"),
        lambda b, h: dispatch(b, h, layout="compact", topk_idx=topk()[:, :1].contiguous()),
        "compact rows of 1 weights",
    ),
    "codes": (
        dispatch,
        lambda b, h: dispatch(b, h, x=Fp8Rows(CODES, torch.ones(T, H // 128))),
        "fp8 as fp8",
    ),
    "exponents": (
        dispatch,
        lambda b, h: dispatch(b, h, x=Fp8Rows(CODES, torch.ones(T, H // 128, dtype=torch.int32))),
        "mxfp8 as mxfp8",
    ),
    "metadata": (
        dispatch,
        lambda b, h: dispatch(b, h, metadata=torch.zeros(T, 3, dtype=torch.int32)),
        "3 words of metadata",
    ),
    "alignment": (dispatch, lambda b, h: dispatch(b, h, expert_alignment=8), "alignment 8"),
    "max_tokens": (
        lambda b, h: dispatch(b, h, capacity=99, max_tokens=T),
        lambda b, h: dispatch(b, h, capacity=99, max_tokens=T + 1),
        "max_tokens",
    ),
    "combine's hidden size": (combine, lambda b, h: combine(b, h, hidden=128), "128"),
    "combine's dtype": (combine, lambda b, h: combine(b, h, torch.float32), "fp32"),
}


# and the fields that it names
DIFFERENT = {
    "dtype": "dtype, wire format)",
    "wire": "wire format)",
    "hidden size": "hidden)",
    "operation": "kind, wire format, use of a plan, plan)",
    "weights": "weights)",
    "cached or not": "use of a plan, plan)",
    "layout": "row layout)",
    "width of compact rows": "row layout)",
    "codes": "dtype, wire format)",
    "exponents": "dtype, wire format)",
    "metadata": "metadata)",
    "alignment": "expert_alignment)",
    "max_tokens": "max_tokens)",
    "combine's hidden size": "hidden)",
    "combine's dtype": "dtype, wire format)",
}


@pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1", "3+1"])
@pytest.mark.parametrize("what", DEVIATIONS)
def test_ranks_that_do_different_things_get_an_error_that_names_both(what: str, layout: str) -> None:
    usual, other, named = DEVIATIONS[what]
    with spec_of(layout).group() as group:
        handles = group.run(lambda rank, buffer: dispatch(buffer, None).handle)

        def step(rank: int, buffer: Buffer) -> str:
            with pytest.raises(RankMismatchError, match=named) as caught:
                (other if rank == DEVIANT else usual)(buffer, handles[rank])
            # Broken for good: the same error again, from every call.
            for again in (dispatch, combine, lambda b, h: b.check()):
                with pytest.raises(RankMismatchError, match=re.escape(str(caught.value))):
                    again(buffer, handles[rank])
            return str(caught.value)

        for outcome in group.outcomes(step, timeout_s=30):
            assert outcome.error is None, outcome.error
            assert outcome.seconds < PROMPTLY_S
            ranks_named = set(re.findall(r"rank (\d+)", outcome.value))
            assert str(DEVIANT) in ranks_named and len(ranks_named) == 2, outcome.value
            assert f"different: {DIFFERENT[what]}" in outcome.value
        group.broken = True


@pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1"])
def test_a_cached_plan_with_another_routing_on_one_rank_is_an_error_on_all(layout: str) -> None:
    with spec_of(layout).group() as group:

        def cached(rank: int, buffer: Buffer) -> Any:
            handle = dispatch(buffer, None).handle
            return dispatch(buffer, None, handle=handle).handle

        handles = group.run(cached)

        def step(rank: int, buffer: Buffer) -> str:
            routing = topk((3, 1, 6)) if rank == DEVIANT else topk()
            with pytest.raises(PlanMismatchError) as caught:
                dispatch(buffer, None, topk_idx=routing, handle=handles[rank])
            return str(caught.value)

        for outcome in group.outcomes(step, timeout_s=30):
            assert outcome.error is None, outcome.error
            assert outcome.seconds < PROMPTLY_S and f"rank {DEVIANT}" in outcome.value
        group.broken = True


def test_ranks_whose_tokens_experts_and_weights_differ_do_nothing_different() -> None:
    """Control: what may differ between ranks is no mismatch."""
    spec = spec_of("2x2")
    with spec.group() as group:
        check_case(group, make_case(3, spec, num_tokens=[0, 1, 17, 5], focus="spread"))

        def step(rank: int, buffer: Buffer) -> None:
            dispatch(buffer, None, topk_idx=topk((0, 0, rank)), topk_weights=torch.full((T, K), float(rank)))

        group.run(step)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("hidden", 512, RankMismatchError),
        ("dispatch_dtype", "bf16", RankMismatchError),
        ("num_experts", 16, RankMismatchError),
        ("source_order", (1, 0, 2, 3), RankMismatchError),
        ("domains", (0, 1, 1, 1), TopologyError),
    ],
)
def test_ranks_with_different_settings_do_not_get_a_buffer(
    field: str, value: Any, error: type[Exception]
) -> None:
    usual = spec_of("2x2").config()
    with pytest.raises(BaseExceptionGroup) as caught:
        RankGroup(4, lambda rank: usual | ({field: value} if rank == 3 else {}))
    assert len(caught.value.exceptions) == 4
    for failure in caught.value.exceptions:
        assert isinstance(failure, error) and field in str(failure)
        assert "rank 3" in str(failure) and "rank 0" in str(failure)
