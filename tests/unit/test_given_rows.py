"""What a caller gives and gets unchanged: rows as FP8 codes and scales, and metadata beside any rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import LAYOUTS, EngineSpec
from tests.harness import RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.common.handle import Fp8Rows, LayoutName
from uccl_ep_train.errors import DtypeError, InputError, ShapeError
from uccl_ep_train.oracle.plan import Plan, Routing
from uccl_ep_train.oracle.reference import place

H, E, K, M = 256, 12, 3, 7
TOKENS = (20, 0, 33, 5)
SPECS = {
    "1x4": EngineSpec(domains=LAYOUTS["1x4"], num_experts=E, hidden=3 * H, source_order=(2, 0, 3, 1)),
    "2x2, small windows": EngineSpec(
        domains=LAYOUTS["2x2"],
        num_experts=E,
        hidden=3 * H,
        settings=(("chunk_bytes", 4096), ("window_chunks", 2)),
    ),
    "3+1": EngineSpec(domains=LAYOUTS["3+1"], num_experts=E, hidden=3 * H),
    "1x1": EngineSpec(domains=(0,), num_experts=E, hidden=3 * H),
    "2x1": EngineSpec(domains=(0, 1), num_experts=E, hidden=3 * H),
}
Engine = tuple[EngineSpec, RankGroup]


@pytest.fixture(scope="module", params=SPECS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    spec = SPECS[request.param]
    with spec.group() as group:
        yield spec, group


EACH_LAYOUT = pytest.mark.parametrize(("layout", "alignment"), [("expert_major", 8), ("compact", 1)])


class Given:
    """One rank's tensors: any bytes are codes, any floats are scales, any words are metadata."""

    def __init__(self, rank: int) -> None:
        with torch.device("cpu"):  # whatever the rank's default device is
            generator = torch.Generator().manual_seed(rank)
            tokens = TOKENS[rank]
            self.bytes = torch.randint(0, 256, (tokens, H), dtype=torch.uint8, generator=generator)
            self.scales = torch.randn(tokens, H // 128, generator=generator)
            self.x = torch.randn(tokens, H, generator=generator).to(torch.bfloat16)
            self.topk_idx = torch.rand(tokens, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
            self.topk_idx[torch.rand(tokens, K, generator=generator) < 0.3] = -1
            self.metadata = torch.randint(
                -(2**31), 2**31 - 1, (tokens, M), dtype=torch.int64, generator=generator
            )
            self.metadata = self.metadata.to(torch.int32)

    def rows(self, device: torch.device) -> Fp8Rows:
        return Fp8Rows(self.bytes.to(device).view(torch.float8_e4m3fn), self.scales.to(device))


def plan_of(spec: EngineSpec, layout: LayoutName, alignment: int) -> Plan:
    given = [Given(rank) for rank in range(spec.num_ranks)]
    routings = [Routing.from_topk(entry.topk_idx, None, E) for entry in given]
    x = [entry.x for entry in given]
    return spec.oracle().dispatch(x, routings, layout=layout, expert_alignment=alignment).plan


def carried(spec: EngineSpec, plan: Plan, rank: int, name: str, padding: float = 0) -> Tensor:
    return place(plan, rank, [getattr(Given(source), name) for source in range(spec.num_ranks)], padding)


def same_codes(result: Any, spec: EngineSpec, plan: Plan, rank: int) -> bool:
    codes = result.fp8_rows.codes
    return torch.equal(codes.view(torch.uint8).cpu(), carried(spec, plan, rank, "bytes"))


@EACH_LAYOUT
def test_codes_scales_and_metadata_come_as_they_were(
    engine: Engine, layout: LayoutName, alignment: int
) -> None:
    spec, group = engine
    plan = plan_of(spec, layout, alignment)

    def step(rank: int, buffer: Buffer) -> None:
        given, device = Given(rank), buffer.device
        metadata = given.metadata.to(device)
        options: Any = {"layout": layout, "expert_alignment": alignment}
        wanted = carried(spec, plan, rank, "scales", 1.0)
        words = carried(spec, plan, rank, "metadata")

        def check(result: Any, has_words: bool) -> None:
            codes, scales = result.fp8_rows
            assert codes.dtype == torch.float8_e4m3fn
            assert same_codes(result, spec, plan, rank) and torch.equal(scales.cpu(), wanted)
            if has_words:
                assert torch.equal(result.metadata.cpu(), words)
            else:
                assert result.metadata is None

        rows, topk_idx = given.rows(device), given.topk_idx.to(device)
        new = buffer.dispatch(rows, topk_idx, metadata=metadata, **options)
        check(new, True)
        check(buffer.dispatch(rows, topk_idx, **options), False)
        check(buffer.dispatch(rows, handle=new.handle), False)
        check(buffer.dispatch_async(rows, handle=new.handle, metadata=metadata).wait(), True)

    group.run(step)


@pytest.mark.parametrize("layout", ["expert_major", "compact"])
def test_scales_that_are_exponents_come_as_exponents(engine: Engine, layout: LayoutName) -> None:
    """Any bytes are exponents. H has 2 blocks, so half of a word; what lies in the other half is dropped."""
    spec, group = engine
    plan = plan_of(spec, layout, 1)

    def step(rank: int, buffer: Buffer) -> None:
        given, device = Given(rank), buffer.device
        codes, topk_idx = given.rows(device).codes, given.topk_idx.to(device)
        words = given.metadata[:, :1].to(device)  # a column: its stride is not 1
        half = carried(spec, plan, rank, "metadata")[:, :1].contiguous().view(torch.uint8)
        half[:, 2:] = 0
        padding = carried(spec, plan, rank, "scales", float("nan")).isnan().any(1)
        half[padding, :2] = 127  # scales of 1

        def check(result: Any) -> None:
            scales = result.fp8_rows.scales
            assert scales.dtype == torch.int32 and scales.shape == (len(half), 1)
            assert torch.equal(scales.cpu().view(torch.uint8), half)
            assert same_codes(result, spec, plan, rank)

        new = buffer.dispatch(Fp8Rows(codes, words), topk_idx, layout=layout)
        check(new)
        check(buffer.dispatch_async(Fp8Rows(codes, words), handle=new.handle).wait())
        # Control: what is given as floats comes as floats.
        assert buffer.dispatch(given.rows(device), handle=new.handle).fp8_rows.scales.dtype == torch.float32

    group.run(step)


@EACH_LAYOUT
def test_words_of_mxfp8_s_exponents_come_as_they_were(
    engine: Engine, layout: LayoutName, alignment: int
) -> None:
    """Any words, also those that are NaN as floats."""
    spec, group = engine
    plan = plan_of(spec, layout, alignment)

    def step(rank: int, buffer: Buffer) -> None:
        given, device = Given(rank), buffer.device
        codes, topk_idx = given.rows(device).codes, given.topk_idx.to(device)
        words = given.metadata[:, :2].to(device)
        came = ~carried(spec, plan, rank, "scales", float("nan")).isnan().any(1)
        options: Any = {"layout": layout, "expert_alignment": alignment}

        def check(result: Any) -> None:
            scales = result.fp8_rows.scales
            assert scales.dtype == torch.int32 and same_codes(result, spec, plan, rank)
            assert torch.equal(scales.cpu()[came], carried(spec, plan, rank, "metadata")[came][:, :2])

        new = buffer.dispatch(Fp8Rows(codes, words), topk_idx, **options)
        check(new)
        check(buffer.dispatch_async(Fp8Rows(codes, words.contiguous()), handle=new.handle).wait())

    group.run(step)


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_metadata_beside_rows_that_the_buffer_sends_its_way(engine: Engine, wire: str) -> None:
    """Neither rows nor gradients change; a capacity cuts metadata as it cuts rows."""
    spec, group = engine
    plan = plan_of(spec, "expert_major", 4)

    def step(rank: int, buffer: Buffer) -> None:
        given, device = Given(rank), buffer.device
        x, topk_idx = given.x.to(device).requires_grad_(), given.topk_idx.to(device)
        metadata = given.metadata.to(device)
        options: Any = {"dispatch_dtype": wire, "expert_alignment": 4}
        words = carried(spec, plan, rank, "metadata")
        plain = buffer.dispatch(x, topk_idx, **options)
        beside = buffer.dispatch(x, topk_idx, metadata=metadata, **options)
        assert torch.equal(beside.rows, plain.rows) and torch.equal(beside.metadata.cpu(), words)
        beside.rows.sum().backward()
        first, x.grad = x.grad, None
        plain.rows.sum().backward()
        assert torch.equal(first, x.grad)
        for capacity in (max(len(words) - 3, 0), len(words) + 9):
            cut = buffer.dispatch(
                x, topk_idx, metadata=metadata, capacity=capacity, pad_to_capacity=True, **options
            )
            kept = words.new_zeros(capacity, M)
            kept[: len(words)] = words[:capacity]
            assert torch.equal(cut.metadata.cpu(), kept)

    group.run(step)


def test_what_cannot_travel_is_refused() -> None:
    spec = SPECS["1x1"]
    given = Given(0)
    rows = given.rows(torch.device("cpu"))
    with spec.group() as group:

        def step(_: int, buffer: Buffer) -> None:
            device = buffer.device
            codes, scales = rows.codes.to(device), rows.scales.to(device)
            metadata, topk_idx = given.metadata.to(device), given.topk_idx.to(device)
            refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
                (Fp8Rows(given.x.to(device), scales), {}, DtypeError, "allowed is float8_e4m3fn"),
                (Fp8Rows(codes, scales.double()), {}, DtypeError, "allowed is float32"),
                (Fp8Rows(codes, scales[:, :1].contiguous()), {}, ShapeError, r"allowed is \[20, 2\]"),
                (
                    Fp8Rows(codes, scales.repeat(1, 2).int()), {}, ShapeError,
                    r"\[20, 4\] int32; allowed is \[20, 1\], .*, or \[20, 2\], four of 32",
                ),
                (Fp8Rows(codes, scales.T.contiguous().T), {}, ShapeError, "x.scales is not contiguous"),
                (Fp8Rows(codes, scales), {"dispatch_dtype": "bf16"}, InputError, "dispatch_dtype = 'bf16'"),
                (codes, {}, DtypeError, "allowed is bfloat16 or float32"),
                (Fp8Rows(codes, scales), {"metadata": metadata.long()}, DtypeError, "allowed is int32"),
                (Fp8Rows(codes, scales), {"metadata": metadata[:-1]}, ShapeError, r"\[20, M\]"),
                (Fp8Rows(codes, scales), {"metadata": metadata[:, :0]}, ShapeError, "M from 1 to 4096"),
                (
                    Fp8Rows(codes, scales), {"metadata": metadata.new_zeros(20, 4000)}, ShapeError,
                    "4000 words of metadata: this buffer was made for rows of",
                ),
            ]  # fmt: skip
            for x, options, error, text in refused:
                with pytest.raises(error, match=text):
                    buffer.dispatch(x, topk_idx, **options)
            buffer.dispatch(Fp8Rows(codes, scales), topk_idx, metadata=metadata)

        group.run(step)
