"""Low-latency calls give the oracle's bits, over any domains, beside a buffer's other calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bits import bit_difference, flip_bit
from tests.cases import EngineSpec
from tests.harness import ON_GPUS, RankGroup
from tests.low_latency import ROOM, SPECS, TOKENS, WIRES, E, H, M, column_major, give, slot_differences
from uccl_ep_train import Buffer
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.common.exponents import pack_exponents
from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.slots import SlotRows, SlotWireName
from uccl_ep_train.oracle.low_latency import Slots, combine_slots, dispatch_slots, words_of

Engine = tuple[EngineSpec, RankGroup]


@pytest.fixture(scope="module", params=SPECS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    spec = SPECS[request.param]
    with spec.group() as group:
        yield spec, group


@pytest.mark.parametrize(("wire", "ue8m0"), WIRES)
@pytest.mark.parametrize("kind", TOKENS)
def test_a_dispatch_gives_the_oracles_rows(
    engine: Engine, kind: str, wire: SlotWireName, ue8m0: bool
) -> None:
    spec, group = engine
    given = give(spec, kind)
    for x in given.x:
        x[1::7, 5], x[2::7, 200] = torch.nan, -torch.inf
    wanted = given.sent(wire, ue8m0)

    def step(rank: int, buffer: Buffer) -> list[str]:
        x, topk_idx, *_ = given.on(rank, buffer.device)
        slots = LowLatency(buffer)
        first = slots.dispatch(x, topk_idx, wire=wire, ue8m0=ue8m0)
        again = slots.dispatch(x, topk_idx, wire=wire, ue8m0=ue8m0)
        handle = first.handle
        assert (handle.max_tokens, handle.hidden, handle.num_tokens) == (M, H, len(x))
        if isinstance(first.rows, Fp8Rows):
            assert column_major(first.rows.scales)
        return slot_differences(first, wanted[rank]) + slot_differences(again, wanted[rank])

    assert group.run(step) == [[] for _ in range(spec.num_ranks)]
    if kind == "all to one expert":
        assert int(wanted[-1].counts[-1]) == spec.num_ranks * M


@pytest.mark.parametrize("kind", TOKENS)
def test_a_combine_gives_the_oracles_sums(engine: Engine, kind: str) -> None:
    """NaN in rows without a token change nothing. The wire of the dispatch does not matter."""
    spec, group = engine
    given = give(spec, kind)
    wanted = given.sums(spec)

    def step(rank: int, buffer: Buffer) -> None:
        x, topk_idx, topk_weights, outputs = given.on(rank, buffer.device)
        slots = LowLatency(buffer)
        for wire, ue8m0 in WIRES:
            handle = slots.dispatch(x, topk_idx, wire=wire, ue8m0=ue8m0).handle
            out = slots.combine(outputs, topk_idx, topk_weights, handle)
            assert not bit_difference(out.cpu(), wanted[rank])
        kept = torch.full_like(out, torch.nan)
        assert slots.combine(outputs, topk_idx, topk_weights, handle, out=kept) is kept
        assert not bit_difference(kept.cpu(), wanted[rank])
        knows = slots.dispatch(x, topk_idx, topk_weights).handle
        for told in ((None, None), (topk_idx, topk_weights), (None, None)):
            assert not bit_difference(slots.combine(outputs, *told, knows).cpu(), wanted[rank])
        # Control: they are the dispatch's.
        others = slots.dispatch(x, topk_idx, 2 * topk_weights).handle
        out = slots.combine(outputs, None, None, others).cpu()
        assert bool(bit_difference(out, wanted[rank])) == bool(wanted[rank].any())

    group.run(step)
    nobody = [(topk_idx < 0).all(dim=1) for topk_idx in given.topk_idx]
    assert all(not out[tokens].any() for out, tokens in zip(wanted, nobody, strict=True))
    assert not any(out.isnan().any() for out in wanted)


def test_special_values_of_rows_and_weights_come_through(engine: Engine) -> None:
    """An infinity or NaN that a token does have reaches its sum, and no other; a NaN has one bit pattern."""
    spec, group = engine
    given = give(spec)
    with torch.device("cpu"):
        for outputs, slots in zip(given.outputs, given.sent(), strict=True):
            for local, count in enumerate(slots.counts.tolist()):
                outputs[local, :count:5, 0:8] = torch.inf
                outputs[local, 1:count:7, 4:12] = -torch.nan
        for weights in given.topk_weights:
            weights[::3] = 0.0
            weights[1::9] = -torch.inf
    wanted = given.sums(spec)

    def step(rank: int, buffer: Buffer) -> str:
        x, topk_idx, topk_weights, outputs = given.on(rank, buffer.device)
        slots = LowLatency(buffer)
        handle = slots.dispatch(x, topk_idx).handle
        return bit_difference(slots.combine(outputs, topk_idx, topk_weights, handle).cpu(), wanted[rank])

    assert group.run(step) == ["" for _ in range(spec.num_ranks)]
    assert wanted[0].isnan().any() and wanted[0].isinf().any() and wanted[0].isfinite().any()


def test_calls_alternate_with_those_of_the_buffer(engine: Engine) -> None:
    """Handles of several dispatches live beside each other, and those of other objects on the buffer."""
    spec, group = engine
    seeds = [give(spec, "unequal", seed) for seed in range(3)]
    wanted = [given.sums(spec) for given in seeds]

    def step(rank: int, buffer: Buffer) -> None:
        inputs = [given.on(rank, buffer.device) for given in seeds]
        slots, others = LowLatency(buffer), LowLatency(buffer)
        handles = [slots.dispatch(x, topk_idx, wire="bf16").handle for x, topk_idx, *_ in inputs]
        for seed in (2, 0, 1, 0):
            x, topk_idx, topk_weights, outputs = inputs[seed]
            plain = buffer.dispatch(x, topk_idx, topk_weights, dispatch_dtype="bf16")
            other = others.dispatch(x, topk_idx, wire="bf16")
            out = slots.combine(outputs, topk_idx, topk_weights, handles[seed])
            sums = buffer.combine(plain.rows, plain.handle)
            assert not bit_difference(out.cpu(), wanted[seed][rank])
            ones = torch.ones_like(topk_weights)
            assert isinstance(other.rows, Tensor)
            twice = [others.combine(other.rows, topk_idx, ones, other.handle) for _ in range(2)]
            assert not bit_difference(twice[0].cpu(), twice[1].cpu())
            # Powers of two times a token: its rows are the token itself, and no sum rounds.
            number = (topk_idx >= 0).sum(1, keepdim=True)
            exact = (number & (number - 1)).flatten() == 0
            assert torch.equal(twice[0][exact], (x * number)[exact])
            assert sums.shape == out.shape

    group.run(step)


class SeenHandle(NamedTuple):
    source_tokens: Tensor
    ranges: Tensor
    counts: Tensor


def as_seen(slots: Slots) -> SlotRows:
    handle: Any = SeenHandle(slots.source_tokens, slots.ranges, slots.counts)
    return SlotRows(slots.rows, slots.counts, handle)


def flip_last(of: Tensor, counts: Tensor) -> Tensor:
    """Another bit in the last row that has a token."""
    local = int(counts.nonzero()[-1])
    copy = of.clone()
    copy[local, : counts[local]] = flip_bit(of[local, : counts[local]].contiguous())
    return copy


@pytest.mark.parametrize(("wire", "ue8m0"), WIRES)
def test_the_comparison_sees_one_bit(wire: SlotWireName, ue8m0: bool) -> None:
    (slots,) = give(SPECS["1x1"]).sent(wire, ue8m0)
    with torch.device("cpu"):
        rows, counts = slots.rows, slots.counts
        others = [
            slots._replace(counts=flip_bit(counts)),
            slots._replace(ranges=flip_bit(slots.ranges)),
            slots._replace(source_tokens=flip_last(slots.source_tokens, counts)),
        ]
        if isinstance(rows, Fp8Rows):
            codes = flip_last(rows.codes.view(torch.uint8), counts).view(torch.float8_e4m3fn)
            others.append(slots._replace(rows=rows._replace(codes=codes)))
            others.append(slots._replace(rows=rows._replace(scales=flip_last(rows.scales, counts))))
            assert not column_major(rows.scales)
        else:
            others.append(slots._replace(rows=flip_last(rows, counts)))
        assert slot_differences(as_seen(slots), slots) == []
        assert all(slot_differences(as_seen(other), slots) for other in others)


def test_the_order_of_sums_is_part_of_the_claim() -> None:
    """Other domains, another order of the experts, or a sum rounded on its way: each gives other bits."""
    spec = SPECS["2x2, small windows"]
    given = give(spec, "all to one expert")
    with torch.device("cpu"):
        wanted = given.sums(spec)

        def differs(other: Sequence[Tensor]) -> bool:
            return any(bit_difference(one, two) != "" for one, two in zip(wanted, other, strict=True))

        def sums_of(outputs: list[Tensor], idx: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
            return combine_slots(outputs, idx, weights, spec.domains, spec.combine_wire_dtype)

        assert not differs(given.sums(spec))
        assert differs(given.sums(SPECS["3+1"])) and differs(given.sums(SPECS["1x4"]))
        assert differs(given.sums(SPECS["interleaved"]))
        # The experts of a rank in descending order: numbers and blocks are mirrored.
        num_local = E // spec.num_ranks
        mirrored = [
            torch.where(idx < 0, idx, idx - 2 * (idx % num_local) + num_local - 1) for idx in given.topk_idx
        ]
        outputs = [rows.flip(0) for rows in given.outputs]
        assert differs(sums_of(outputs, mirrored, given.topk_weights))
        rounded = [weights.bfloat16().float() for weights in given.topk_weights]
        assert differs(sums_of(given.outputs, given.topk_idx, rounded))
        assert differs(given.sums(replace(spec, combine_wire_dtype="bf16")))


def test_exponents_are_packed_four_to_a_word() -> None:
    """As the oracle packs them; the lowest byte is the first block."""
    with torch.device("cpu"):
        for blocks in range(1, 10):
            scales = 2.0 ** torch.randint(-117, 119, (5, blocks)).to(torch.float32)
            assert torch.equal(pack_exponents(scales), words_of(scales))
        assert pack_exponents(torch.tensor([[1.0, 2.0, 0.5, 2.0**119, 4.0]])).tolist() == [
            [(127 | 128 << 8 | 126 << 16 | 246 << 24) - 2**32, 129]
        ]


class Waits(TorchDispatchMode):
    """Records the operators of torch that make the host wait for a GPU, or need sizes that depend on data."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_to_cpu", "equal", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.NAMES or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_no_call_reads_a_tensor_on_the_host() -> None:
    # Beside the group of the fixture, which has most of a GPU's SMs.
    spec = replace(SPECS["1x1"], settings=(*ROOM, ("low_latency_sms", 8)))
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            x, topk_idx, topk_weights, outputs = given.on(rank, buffer.device)
            slots = LowLatency(buffer)
            with Waits() as waits:
                for wire, ue8m0 in WIRES:
                    handle = slots.dispatch(x, topk_idx, wire=wire, ue8m0=ue8m0).handle
                    slots.combine(outputs, topk_idx, topk_weights, handle)
            assert waits.seen == []
            with Waits() as control:
                x[topk_idx[:, 0] >= 0].sum().item()
            assert control.seen == ["index", "_local_scalar_dense"]

        group.run(step)


@pytest.mark.skipif(ON_GPUS, reason="--backend cuda: it is of CPUs")
@pytest.mark.parametrize("domains", [tuple(r // 8 for r in range(65)), tuple(r % 9 for r in range(72))])
def test_many_ranks_have_the_oracles_bits(domains: tuple[int, ...]) -> None:
    """8 domains of 8 and one of 1; 9 of 8, interleaved."""
    num_ranks, tokens, hidden, topk = len(domains), 3, 128, 8
    room = (("low_latency_tokens", tokens), ("low_latency_topk", topk), ("budget_bytes", 64 << 20))
    spec = EngineSpec(domains=domains, num_experts=2 * num_ranks, hidden=hidden, settings=room)
    generator = torch.Generator().manual_seed(num_ranks)
    x, idx, weights, outputs = [], [], [], []
    for _ in domains:
        x.append(torch.randn(tokens, hidden, generator=generator).bfloat16())
        routing = torch.rand(tokens, spec.num_experts, generator=generator).argsort(1)
        idx.append(routing[:, :topk].contiguous())
        weights.append(torch.rand(tokens, topk, generator=generator))
        outputs.append(torch.randn(2, num_ranks * tokens, hidden, generator=generator).bfloat16())
    slots = dispatch_slots(x, idx, spec.num_experts, tokens, "bf16")
    sums = combine_slots(outputs, idx, weights, domains, "bf16")

    def step(rank: int, buffer: Buffer) -> list[str]:
        calls = LowLatency(buffer)
        got = calls.dispatch(x[rank], idx[rank], wire="bf16")
        out = calls.combine(outputs[rank], idx[rank], weights[rank], got.handle)
        why = bit_difference(out, sums[rank])
        return slot_differences(got, slots[rank]) + ([why] if why else [])

    with spec.group() as group:
        assert group.run(step) == [[] for _ in domains]
