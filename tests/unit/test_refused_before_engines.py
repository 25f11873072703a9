"""Contract 9 at doors that prepare a call before the engine sees it: what one rank refuses there counts, too.

Rank 1 refuses a call, catches the error and makes its next one, while rank 0 waits in the call that rank 1
refused. Both must raise: rows of different calls never meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer as Engine
from uccl_ep_train import EpConfig
from uccl_ep_train.api.operators import HAS_EFFECTS, Operators
from uccl_ep_train.deep_ep import Buffer, ElasticBuffer
from uccl_ep_train.errors import DtypeError, InputError, RankMismatchError, ShapeError

H, E, K, T, MOST = 128, 8, 2, 5, 8
TIMEOUT_S = 100


def tokens_of(rank: int, value: float, tokens: int = T, experts: int = E) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.full((tokens, H), value, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(rank)
    idx = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :K].contiguous()
    return x, idx, torch.ones(tokens, K)


@dataclass
class Door:
    """A call that works, and the same with what this rank refuses."""

    good: Callable[[float], Any]
    bad: Callable[[], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    close: Callable[[], Any]


def elastic(rank: int, num_warm: int = 0, other_experts: int = 0) -> Door:
    """num_warm: calls before. other_experts: of another engine, which is made later."""
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST)

    def good(value: float, tokens: int = T, experts: int = E) -> Any:
        return buffer.dispatch(*tokens_of(rank, value, tokens, experts), num_experts=experts)

    for _ in range(num_warm):
        good(0.0)
    if other_experts:
        good(0.0, experts=other_experts)
    return Door(good, lambda: good(1.0, MOST + 1), InputError, buffer.destroy)


def elastic_combine(rank: int) -> Door:
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST)
    recv_x, _, _, handle, _ = buffer.dispatch(*tokens_of(rank, 1.0), num_experts=E)
    assert isinstance(recv_x, Tensor)
    wrong: Any = object()
    return Door(
        lambda value: buffer.combine(recv_x * value, handle),
        lambda: buffer.combine(recv_x, wrong), DtypeError, buffer.destroy,
    )  # fmt: skip


def first_interface(rank: int, num_warm: int, change: dict[str, Any]) -> Door:
    buffer = Buffer(dist.group.WORLD)

    def good(value: float, **changed: Any) -> Any:
        x, idx, weights = tokens_of(rank, value)
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
        given = {
            "x": x, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert, "topk_idx": idx,
            "topk_weights": weights,
        }  # fmt: skip
        return buffer.dispatch(**{**given, **changed})

    for _ in range(num_warm):
        good(0.0)
    return Door(good, lambda: good(1.0, **change), (ShapeError, DtypeError, InputError), buffer.destroy)


def first_combine(rank: int) -> Door:
    buffer = Buffer(dist.group.WORLD)
    x, idx, weights = tokens_of(rank, 1.0)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
    rows, _, _, _, handle, _ = buffer.dispatch(
        x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights
    )
    assert isinstance(rows, Tensor) and handle is not None
    wrong: Any = ()
    return Door(
        lambda value: buffer.combine(rows * value, handle),
        lambda: buffer.combine(rows, wrong), DtypeError, buffer.destroy,
    )  # fmt: skip


def low_latency(rank: int, num_warm: int, change: dict[str, Any]) -> Door:
    buffer = Buffer(dist.group.WORLD, 0, 0, low_latency_mode=True)

    def good(value: float, **changed: Any) -> Any:
        x, idx, _ = tokens_of(rank, value)
        given = {"x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": MOST, "num_experts": E}
        return buffer.low_latency_dispatch(**{**given, "use_fp8": False, **changed})

    for _ in range(num_warm):
        good(0.0)
    return Door(good, lambda: good(1.0, **change), (InputError, DtypeError), buffer.destroy)


def low_latency_combine(rank: int) -> Door:
    buffer = Buffer(dist.group.WORLD, 0, 0, low_latency_mode=True)
    x, idx, weights = tokens_of(rank, 1.0)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, E, use_fp8=False)
    assert isinstance(rows, Tensor)

    def good(value: float, **changed: Any) -> Any:
        return buffer.low_latency_combine(rows * value, idx, weights, handle, **changed)

    bad = partial(good, 1.0, async_finish=True, return_recv_hook=True)
    return Door(good, bad, InputError, buffer.destroy)


def operators(rank: int, what: str) -> Door:
    engine = Engine(
        dist.group.WORLD, EpConfig(num_experts=E, hidden=H, backend="host", budget_bytes=16 << 20)
    )
    calls = Operators(engine, capacity=40)
    x, idx, weights = tokens_of(rank, 1.0)
    nothing: Any = None
    if what == "dispatch":
        return Door(
            lambda value: calls.dispatch(x * value, idx, weights),
            lambda: calls.dispatch(x, idx, nothing), DtypeError, engine.close,
        )  # fmt: skip
    got = calls.dispatch(x, idx, weights)
    if what == "dispatch_again":
        return Door(
            lambda value: calls.dispatch_again(x * value, got.ticket),
            lambda: calls.dispatch_again(x, torch.tensor([1 << 40])), InputError, engine.close,
        )  # fmt: skip
    return Door(
        lambda value: calls.combine(got.rows * value, got.ticket, T),
        lambda: calls.combine(got.rows, got.ticket, T + 1), ShapeError, engine.close,
    )  # fmt: skip


DOORS: dict[str, Callable[[int], Door]] = {
    "elastic, first call": elastic,
    "elastic, later": partial(elastic, num_warm=2),
    "elastic, an engine before the last": partial(elastic, num_warm=1, other_experts=2 * E),
    "elastic combine": elastic_combine,
    "first interface, first call": partial(first_interface, num_warm=0, change={"x": torch.ones(T)}),
    "first interface, one dimension": partial(first_interface, num_warm=1, change={"x": torch.ones(T)}),
    "first interface, no event": partial(first_interface, num_warm=1, change={"previous_event": 3}),
    "first interface, no layout": partial(first_interface, num_warm=1, change={"is_token_in_rank": None}),
    "first combine": first_combine,
    "low latency, first call": partial(low_latency, num_warm=0, change={"use_ue8m0": True}),
    "low latency, later": partial(low_latency, num_warm=1, change={"use_ue8m0": True}),
    "low latency, no routing": partial(low_latency, num_warm=1, change={"topk_idx": None}),
    "low latency combine": low_latency_combine,
    **({what: partial(operators, what=what) for what in ("dispatch", "dispatch_again", "combine")}
       if HAS_EFFECTS else {}),
}  # fmt: skip


def one_refuses(rank: Rank, name: str, refuses: bool) -> str:
    door = DOORS[name](rank.rank)
    if not refuses:  # control
        for value in (1.0, 2.0):
            door.good(value)
        door.close()
        return "together"
    if rank.rank == 1:
        with pytest.raises(door.error):
            door.bad()
    with pytest.raises(RankMismatchError):
        door.good(2.0)
    return "raised"


@pytest.mark.parametrize("name", DOORS)
def test_a_call_that_one_rank_refuses_meets_no_other_call(name: str) -> None:
    for refuses, wanted in ((True, "raised"), (False, "together")):
        with ProcessRanks(2, one_refuses, (name, refuses)) as ranks:
            for outcome in ranks.outcomes(timeout_s=TIMEOUT_S).values():
                assert outcome.value == wanted, outcome.trace


def all_refuse(rank: Rank) -> str:
    """What all refuse alike counts alike: they go on, also before there is an engine."""
    door = elastic(rank.rank)
    for _ in range(2):
        with pytest.raises(InputError):
            door.bad()
    for value in (1.0, 2.0):
        recv_x = door.good(value)[0]
        assert recv_x.eq(value).all()
    door.close()
    return "together"


def test_ranks_that_refuse_alike_go_on() -> None:
    with ProcessRanks(2, all_refuse) as ranks:
        for outcome in ranks.outcomes(timeout_s=TIMEOUT_S).values():
            assert outcome.value == "together", outcome.trace
