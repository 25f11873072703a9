"""Global settings of torch that a program may have made change no result: defaults, autocast, checks.

Ranks are processes, because most of these settings are a process's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig, LocalBootstrap, deep_ep
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.api.operators import Operators
from uccl_ep_train.common.handle import DispatchHandle, Fp8Rows
from uccl_ep_train.common.slots import SlotWireName
from uccl_ep_train.errors import InputError
from uccl_ep_train.oracle.low_latency import combine_slots, dispatch_slots
from uccl_ep_train.oracle.plan import Routing
from uccl_ep_train.oracle.reference import ReferenceGroup

RANKS, T, H, E, K = 2, 9, 256, 8, 3


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    # What is made without a device has no values there.
    "default device": lambda: torch.device("meta"),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default float64": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=False),
}


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(T, H, generator=generator, device="cpu", dtype=torch.float32).to(torch.bfloat16)
    scores = torch.rand(T, E, generator=generator, device="cpu", dtype=torch.float32)
    return x, scores.argsort(1)[:, :K].contiguous(), scores[:, :K].contiguous()


def outputs() -> Tensor:
    """Of the experts, in slots [L, R * T, H]."""
    return torch.full((E // RANKS, RANKS * T, H), 2.0, dtype=torch.bfloat16, device="cpu")


def parts(rows: Tensor | Fp8Rows) -> tuple[Tensor, ...]:
    return (rows,) if isinstance(rows, Tensor) else (rows.codes, rows.scales)


FORMS: tuple[dict[str, Any], ...] = (
    {"expert_alignment": 4},
    {"layout": "compact", "capacity": RANKS * T, "pad_to_capacity": True},
)


def buffer_calls(rank: Rank) -> list[Tensor]:
    x, idx, weights = inputs(rank.rank)
    found: list[Any] = []
    with Buffer(
        rank.group, EpConfig(num_experts=E, hidden=H, budget_bytes=32 << 20, domain_size=1)
    ) as buffer:
        for form in FORMS:
            given, given_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
            got = buffer.dispatch(given, idx, given_weights, **form)
            again = buffer.dispatch(given * 2, handle=got.handle)
            out = buffer.combine(got.rows + again.rows, got.handle)
            assert got.row_weights is not None
            (out.sum() + (got.row_weights * got.row_weights).sum()).backward()
            found += [got.rows, got.row_weights, got.tokens_per_expert, again.rows, out]
            found += [given.grad, given_weights.grad, buffer.combine(again.rows, got.handle, bias=(x,))]
            found += parts(buffer.dispatch(x, idx, weights, output_dtype="fp8", **form).rows)
        routing_map = torch.zeros(T, E, dtype=torch.bool, device="cpu").scatter_(1, idx, True)
        by_map = buffer.dispatch(x, routing_map=routing_map)
        return [*found, by_map.rows, buffer.combine(by_map.rows, by_map.handle)]


def operators(rank: Rank) -> list[Tensor]:
    x, idx, weights = inputs(rank.rank)
    with Buffer(rank.group, EpConfig(num_experts=E, hidden=H, budget_bytes=32 << 20)) as buffer:
        calls = Operators(buffer, capacity=RANKS * T * K)
        given = x.clone().requires_grad_()
        got = calls.dispatch(given, idx, weights)
        out = calls.combine(got.rows + calls.dispatch_again(given, got.ticket), got.ticket, T)
        out.sum().backward()
        assert given.grad is not None
        return [got.rows, got.row_weights, got.tokens_per_expert, out, given.grad]


WIRES: tuple[tuple[SlotWireName, bool], ...] = (("bf16", False), ("fp8", True), ("fp8_fp32", False))


def low_latency(rank: Rank) -> list[Tensor]:
    x, idx, weights = inputs(rank.rank)
    config = EpConfig(
        num_experts=E, hidden=H, budget_bytes=64 << 20, low_latency_tokens=T, low_latency_topk=K
    )
    found = []
    with Buffer(rank.group, config) as buffer:
        calls = LowLatency(buffer)
        for wire, ue8m0 in WIRES:
            got = calls.dispatch(x, idx, wire=wire, ue8m0=ue8m0)
            for part in parts(got.rows):  # memory beyond the counts may hold anything
                found += [part[e, :count] for e, count in enumerate(got.counts.tolist())]
            found += [got.counts, calls.combine(outputs(), idx, weights, got.handle)]
    return found


def module(rank: Rank) -> list[Tensor]:
    x, idx, weights = inputs(rank.rank)
    buffer: Any = deep_ep.Buffer(rank.group, 64 << 20, 0, low_latency_mode=True)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    got, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
        x, **layout, topk_idx=idx, topk_weights=weights
    )
    out, out_weights, _ = buffer.combine(got, handle, recv_weights, bias=x)
    by_rank = buffer.dispatch(x, **layout)
    slots, slot_counts, slot_handle, _, _ = buffer.low_latency_dispatch(x, idx, T, E, use_fp8=False)
    slot_sums, _, _ = buffer.low_latency_combine(slots, idx, weights, slot_handle)
    told = torch.tensor(counts, device="cpu")
    found = [per_rank, per_expert, in_rank, got, recv_idx, recv_weights, told, *handle, out, out_weights]
    found += [by_rank[0], *by_rank[4], slot_counts, slot_sums]
    buffer.destroy()
    elastic: Any = deep_ep.ElasticBuffer(rank.group, num_max_tokens_per_rank=T, hidden=H, num_topk=K)
    rows, expanded_idx, expanded_weights, elastic_handle, _ = elastic.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=E
    )
    sums, sum_weights, _ = elastic.combine(rows, elastic_handle, topk_weights=expanded_weights)
    elastic.destroy()
    return [*found, rows, expanded_idx, expanded_weights, sums, sum_weights]


def oracle(rank: Rank) -> list[Tensor]:
    given = [inputs(r) for r in range(RANKS)]
    x, all_idx, all_weights = ([of_ranks[i] for of_ranks in given] for i in range(3))
    routings = [Routing.from_topk(idx, weights, E) for _, idx, weights in given]
    group = ReferenceGroup((0, 1), E)
    sent = group.dispatch(x, routings, expert_alignment=4)
    assert sent.row_weights is not None
    back = group.dispatch_backward(sent.rows, sent.row_weights, sent.plan)
    assert back.grad_weights is not None
    found = [*sent.rows, *sent.row_weights, *back.outputs, *back.grad_weights]
    found += group.combine(sent.rows, sent.plan, [[of_rank] for of_rank in x]).outputs
    for wire, ue8m0 in WIRES:
        slots = dispatch_slots(x, all_idx, E, T, wire, ue8m0)[rank.rank]
        found += [slots.counts, *parts(slots.rows)]
    return [*found, *combine_slots([outputs()] * RANKS, all_idx, all_weights, (0, 1))]


Flow = Callable[[Rank], list[Tensor]]
FLOWS: dict[str, Flow] = {
    flow.__name__: flow for flow in (buffer_calls, operators, low_latency, module, oracle)
}


def difference(wanted: list[Tensor], found: list[Tensor]) -> str:
    """The first one, or nothing."""
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        if (a.dtype, a.device) != (b.dtype, b.device):
            return f"result {i} is {b.dtype} on {b.device}, not {a.dtype} on {a.device}"
        if not torch.equal(a, b):
            return f"result {i} differs"
    return ""


def under_modes(rank: Rank, name: str) -> dict[str, str]:
    """The differences by mode."""
    flow = FLOWS[name]
    wanted, found = flow(rank), {}
    for mode, entered in MODES.items():
        # The oracle works where torch's default device is.
        if (name, mode) == ("oracle", "default device"):
            continue
        try:
            with entered():
                found[mode] = difference(wanted, flow(rank))
        except Exception as error:
            error.add_note(f"under {mode}")
            raise
    return found


@pytest.mark.parametrize("flow", FLOWS)
def test_no_result_depends_on_global_settings_of_torch(flow: str) -> None:
    with ProcessRanks(RANKS, under_modes, (flow,)) as ranks:
        for outcome in ranks.outcomes(timeout_s=110).values():
            assert not outcome.error, outcome.trace
            assert len(outcome.value) >= len(MODES) - 1 and not any(outcome.value.values()), outcome.value


def test_a_result_of_another_dtype_or_value_is_found() -> None:
    """Control: what is made without a dtype."""
    wanted = [torch.zeros(3, device="cpu", dtype=torch.float32)]
    with default_dtype(torch.bfloat16):
        assert difference(wanted, [torch.zeros(3, device="cpu")]) == (
            "result 0 is torch.bfloat16 on cpu, not torch.float32 on cpu"
        )
    assert difference(wanted, [wanted[0] + 1]) == "result 0 differs"
    assert difference(wanted, [wanted[0].clone()]) == ""


def traced(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.jit.trace(lambda rows: call(rows), (x,))


def recorded(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return make_fx(call)(x)


def faked(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with FakeTensorMode():
        return call(x)


def counted(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with FlopCounterMode(display=False):
        return call(x)


@pytest.mark.parametrize(
    ("dtype", "wire", "comes_as"),
    [(torch.float32, "bf16", 1.5 * 2**-127), (torch.bfloat16, "fp8", 2**-126)],  # the least code of FP8
)
def test_denormals_are_kept_whatever_the_thread_does_that_creates_the_buffer(
    dtype: torch.dtype, wire: Any, comes_as: float
) -> None:
    """Threads inherit the arithmetic of who starts them."""
    x, wanted = (torch.full((T, H), value, dtype=dtype) for value in (1.5 * 2**-127, comes_as))
    routing_map = torch.ones(T, 2, dtype=torch.bool)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert not (x.float() * 2).count_nonzero()  # control
        with Buffer(None, EpConfig(**SETTINGS), bootstrap=LocalBootstrap.create(1)[0]) as buffer:
            got = buffer.dispatch(x, routing_map=routing_map, dispatch_dtype=wire)
            out = buffer.combine(got.rows, got.handle)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got.rows, wanted.repeat(2, 1)) and torch.equal(out, wanted * 2)


SETTINGS: dict[str, Any] = {"num_experts": 2, "hidden": H, "backend": "host", "budget_bytes": 64 << 20}
ONE = torch.zeros(T, 1, dtype=torch.int64)
CALLS: dict[str, Callable[[Buffer, DispatchHandle, Tensor], Any]] = {
    "dispatch": lambda buffer, _, x: buffer.dispatch(x, ONE).rows,
    "dispatch, async": lambda buffer, _, x: buffer.dispatch_async(x, ONE).wait().rows,
    "combine": lambda buffer, handle, x: buffer.combine(x, handle),
    "low latency": lambda buffer, _, x: LowLatency(buffer).dispatch(x, ONE, wire="bf16").rows[0, :T],  # type: ignore[index]
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("recorder", [traced, recorded, faked])
def test_who_records_a_call_instead_of_making_it_is_refused(recorder: Any, what: str) -> None:
    config = EpConfig(low_latency_tokens=T, low_latency_topk=1, **SETTINGS)
    with Buffer(None, config, bootstrap=LocalBootstrap.create(1)[0]) as buffer:
        x = torch.ones(T, H, dtype=torch.bfloat16)
        call = partial(CALLS[what], buffer, buffer.dispatch(x, ONE).handle)
        with pytest.raises(InputError, match="allowed is a call outside of it"):
            recorder(call, x)
        # Control: a mode that only looks on is none of these.
        assert torch.equal(counted(call, x), call(x))
