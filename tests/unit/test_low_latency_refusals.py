"""Low-latency calls with wrong arguments: typed errors, before anything is launched, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bits import bit_difference
from tests.cases import EngineSpec
from tests.low_latency import SPECS, E, H, K, M, give
from uccl_ep_train import Buffer
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.slots import SlotWireName
from uccl_ep_train.errors import (
    ConfigError,
    DtypeError,
    InputError,
    RankMismatchError,
    ShapeError,
)


def twice(buffer: Buffer, call: Callable[[], object]) -> None:
    """On a GPU an error shows when the kernels are over."""
    for _ in range(2):
        call()
        buffer.check()
        if buffer.device.type == "cuda":
            torch.cuda.synchronize()


def refused_dispatches(
    x: Tensor, topk_idx: Tensor
) -> list[tuple[tuple[Any, ...], Any, type[Exception], str]]:
    long = x.new_zeros(M + 1, H), topk_idx.new_zeros(M + 1, K)
    return [
        (long, {}, ShapeError, f"x has {M + 1} rows; allowed is at most max_tokens = {M}"),
        ((x.float(), topk_idx), {}, DtypeError, "x is torch.float32; allowed is torch.bfloat16"),
        ((x.half(), topk_idx), {}, DtypeError, "allowed is bfloat16 or float32"),
        ((x[:, :200].contiguous(), topk_idx), {}, ShapeError, "x has 200 columns"),
        ((x[0], topk_idx), {}, ShapeError, "x has 1 dimensions"),
        ((x, topk_idx.int()), {}, DtypeError, "allowed is int64"),
        ((x, topk_idx[:-1]), {}, ShapeError, "topk_idx has"),
        ((x, topk_idx, x.new_zeros(len(x), K)), {}, DtypeError, "allowed is float32"),
        ((x, topk_idx, x.new_zeros(len(x), 1).float()), {}, ShapeError, "topk_weights"),
        ((x, topk_idx), {"wire": "fp16"}, InputError, "wire = 'fp16'; allowed is 'bf16'"),
        ((x, topk_idx), {"wire": "bf16", "ue8m0": True}, InputError, "ue8m0 = True with wire = 'bf16'"),
        ((x, topk_idx), {"wire": "fp8_fp32", "ue8m0": True}, InputError, "with wire = 'fp8_fp32'"),
        ((x, topk_idx), {"ue8m0": 1}, InputError, "ue8m0 = 1; allowed is True | False"),
        ((x, topk_idx), {"statistics": (None, None)}, DtypeError, "statistics is tuple; allowed is SlotS"),
        ((x, topk_idx), {"statistics": x}, DtypeError, "statistics is Tensor"),
        ((x, topk_idx), {"statistics": {}}, DtypeError, "statistics is dict"),
    ]  # fmt: skip


def refused_combines(
    given: tuple[Tensor, Tensor, Tensor], handle: Any, strange: Any
) -> list[tuple[tuple[Any, ...], Any, type[Exception], str]]:
    rows, topk_idx, weights = given
    out = rows.new_empty(len(topk_idx), H)
    return [
        ((rows[:, 1:], topk_idx, weights, handle), {}, ShapeError, r"rows is .*; allowed is \[12, 24, 384\]"),
        ((rows.float(), topk_idx, weights, handle), {}, DtypeError, "rows is torch.float32"),
        ((rows.mT.contiguous().mT, topk_idx, weights, handle), {}, ShapeError, "rows is not contiguous"),
        ((rows, topk_idx[1:], weights[1:], handle), {}, ShapeError, r"topk_idx is .*; allowed is \[20, 6\]"),
        ((rows, topk_idx[:, 1:], weights[:, 1:], handle), {}, ShapeError, r"\[20, 5\]; allowed is \[20, 6\]"),
        ((rows, topk_idx, None, handle), {}, DtypeError, "topk_weights is NoneType"),
        ((rows, None, weights, handle), {}, DtypeError, "topk_idx is NoneType"),
        ((rows, None, None, handle), {}, InputError, "allowed is that where the dispatch was given weights"),
        ((rows, topk_idx, weights.double(), handle), {}, DtypeError, "allowed is float32"),
        ((rows, topk_idx, weights, None), {}, DtypeError, "handle is NoneType"),
        ((rows, topk_idx, weights, strange), {}, InputError, "the handle comes from another buffer"),
        ((rows, topk_idx, weights, handle), {"out": out[1:]}, ShapeError, r"allowed is \[20, 384\]"),
        ((rows, topk_idx, weights, handle), {"out": out.float()}, DtypeError, "out is torch.float32"),
        ((rows, topk_idx, weights, handle), {"out": out.mT.contiguous().mT}, ShapeError, "is not contiguous"),
    ]  # fmt: skip


def test_a_wrong_argument_is_refused_before_anything_is_launched() -> None:
    """Each error names the value and what is allowed; the buffer works on."""
    spec = SPECS["1x1"]
    given = give(spec)
    wanted = given.sums(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            x, topk_idx, topk_weights, outputs = given.on(rank, buffer.device)
            slots = LowLatency(buffer)
            handle = slots.dispatch(x, topk_idx).handle
            strange = LowLatency(buffer).dispatch(x, topk_idx).handle
            for args, options, error, text in refused_dispatches(x, topk_idx):
                with pytest.raises(error, match=text):
                    slots.dispatch(*args, **options)
            for args, options, error, text in refused_combines(
                (outputs, topk_idx, topk_weights), handle, strange
            ):
                with pytest.raises(error, match=text):
                    slots.combine(*args, **options)
            out = slots.combine(outputs, topk_idx, topk_weights, handle)
            assert not bit_difference(out.cpu(), wanted[rank])

        group.run(step)


def test_what_is_no_buffer_is_refused() -> None:
    with pytest.raises(DtypeError, match="buffer is NoneType; allowed is a Buffer"):
        LowLatency(None)  # type: ignore[arg-type]


def test_a_buffer_that_cannot_do_it_is_refused() -> None:
    with EngineSpec(domains=(0,), num_experts=E, hidden=H).group() as group:

        def refuse(_: int, buffer: Buffer) -> None:
            with pytest.raises(ConfigError, match="low_latency_tokens = None; allowed is the most tokens"):
                LowLatency(buffer)

        group.run(refuse)
    with torch.device("cpu"):
        wide = torch.zeros(3, H, dtype=torch.bfloat16), torch.arange(K + 1).expand(3, K + 1).contiguous()
    with SPECS["1x1"].group() as group:

        def refuse_width(_: int, buffer: Buffer) -> None:
            with pytest.raises(ShapeError, match=f"{K + 1} columns of topk_idx; allowed are {K}"):
                LowLatency(buffer).dispatch(*(tensor.to(buffer.device) for tensor in wide))

        group.run(refuse_width)


@pytest.mark.parametrize("refused", ["dispatch", "combine"])
def test_a_call_that_one_rank_refuses_counts_on_all(refused: str) -> None:
    """The others do not wait for it, and no rows of different calls meet."""
    spec = SPECS["2x1"]
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            x, topk_idx, topk_weights, outputs = given.on(rank, buffer.device)
            slots = LowLatency(buffer)
            handle = slots.dispatch(x, topk_idx).handle
            if rank == 1:
                with pytest.raises(InputError):
                    if refused == "dispatch":
                        slots.dispatch(x, topk_idx, ue8m0=True, wire="bf16")
                    else:
                        slots.combine(outputs[1:], topk_idx, topk_weights, handle)
            with pytest.raises(RankMismatchError, match="refused"):
                twice(buffer, lambda: slots.dispatch(x, topk_idx))

        group.run(step)


@pytest.mark.parametrize("differs", ["weights", "scales"])
def test_ranks_that_differ_in_weights_or_scales_make_different_calls(differs: str) -> None:
    spec = SPECS["2x1"]
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            x, topk_idx, topk_weights, _ = given.on(rank, buffer.device)
            slots = LowLatency(buffer)
            slots.dispatch(x, topk_idx, topk_weights)
            weights = topk_weights if rank or differs == "scales" else None
            wire: SlotWireName = "fp8" if rank or differs == "weights" else "fp8_fp32"
            with pytest.raises(RankMismatchError):
                twice(buffer, lambda: slots.dispatch(x, topk_idx, weights, wire=wire))

        group.run(step)


def test_only_a_dispatch_that_quantises_names_scales() -> None:
    spec = SPECS["1x1"]
    given = give(spec)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            x, topk_idx, *_ = given.on(rank, buffer.device)
            scales = x.new_ones(len(x), H // 128, dtype=torch.float32)
            quantised = Fp8Rows(x.to(torch.float8_e4m3fn), scales)
            wrong: list[tuple[Any, Any, str]] = [
                (x, "fp8_e8m0", "'fp8_e8m0'; allowed is 'fp8' | 'bf16' | 'fp8_pow2' | 'fp8_fp32'"),
                (x.float(), "fp8_pow2", "x is float32 and dispatch_dtype = 'fp8'"),
                (quantised, "fp8_pow2", "dispatch_dtype = 'fp8_pow2'; allowed is 'fp8'"),
            ]
            for rows, dtype, text in wrong:
                with pytest.raises(InputError, match=text.replace("|", r"\|")):
                    buffer.dispatch(rows, topk_idx, dispatch_dtype=dtype)
            named: Any = "fp8_pow2"
            with pytest.raises(InputError, match=r"grad_dtype = 'fp8_pow2'; allowed is 'fp8' \| 'bf16'$"):
                plain = buffer.dispatch(x, topk_idx)
                buffer.combine(plain.rows, plain.handle, grad_dtype=named)

        group.run(step)
