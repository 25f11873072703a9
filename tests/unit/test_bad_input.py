"""Bad input raises the documented error before anything is launched, and leaves the buffer usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.masked import masked_tensor

from tests.harness import RankGroup
from uccl_ep_train import Buffer, DispatchResult, Fp8Rows
from uccl_ep_train.errors import DeviceError, DtypeError, InputError, RoutingError, ShapeError

T, H, K, E = 4, 256, 2, 8
BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with RankGroup(2, {"num_experts": E, "hidden": H, "domain_size": 1}) as ranks:
        yield ranks


def x() -> Tensor:
    return torch.ones(T, H, dtype=BF16)


def topk() -> dict[str, Tensor]:
    return {"topk_idx": torch.arange(T * K).reshape(T, K) % E, "topk_weights": torch.ones(T, K)}


def mapped() -> dict[str, Tensor]:
    return {"routing_map": torch.eye(T, E, dtype=torch.bool), "probs": torch.ones(T, E)}


def with_topk(**changes: Any) -> dict[str, Any]:
    return {"x": x(), **topk(), **changes}


def bf16(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=BF16)


def ids(columns: int, rows: int = T) -> Tensor:
    return torch.zeros(rows, columns, dtype=INT64)


def with_map(**changes: Any) -> dict[str, Any]:
    return {"x": x(), **mapped(), **changes}


def freed(tensor: Tensor) -> Tensor:
    """As frameworks do that give activations or weights back."""
    tensor.untyped_storage().resize_(0)
    return tensor


def negated(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns // 2, 2, dtype=FP32).neg().reshape(rows, columns)._neg_view()


BAD_DISPATCH: dict[str, tuple[type[Exception], str, Callable[[], dict[str, Any]]]] = {
    "x fp64": (DtypeError, "x is float64", lambda: with_topk(x=x().double())),
    "x fp16": (DtypeError, "x is float16", lambda: with_topk(x=x().half())),
    "x no tensor": (DtypeError, "x is list", lambda: with_topk(x=[1.0])),
    "x fp32 as fp8": (DtypeError, "'fp8' quantises BF16 rows only", lambda: with_topk(x=x().float())),
    "x one dimension": (ShapeError, "x has 1 dimensions", lambda: with_topk(x=x()[0])),
    "x freed": (InputError, "x, a Tensor, has no memory of its own", lambda: with_topk(x=freed(bf16(T, H)))),
    "x negated": (InputError, r"x\.resolve_neg\(\)", lambda: with_topk(x=negated(T, H))),
    "x strided": (ShapeError, r"x\.contiguous\(\)", lambda: with_topk(x=bf16(T, 2 * H)[:, ::2])),
    "x transposed": (ShapeError, "not contiguous", lambda: with_topk(x=bf16(H, T).t())),
    "x expanded": (ShapeError, "not contiguous", lambda: with_topk(x=bf16(1, H).expand(T, H))),
    "x narrow": (ShapeError, "x has 100 columns", lambda: with_topk(x=bf16(T, 100))),
    "x without columns": (ShapeError, "x has 0 columns", lambda: with_topk(x=bf16(T, 0))),
    "x wider than the buffer": (ShapeError, "hidden = 256", lambda: with_topk(x=bf16(T, 384))),
    "x elsewhere": (DeviceError, "x is on meta; allowed is cpu", lambda: with_topk(x=x().to("meta"))),
    "x sparse": (InputError, "plain dense tensor", lambda: with_topk(x=x().to_sparse())),
    "x without routing": (InputError, "no routing", lambda: {"x": x()}),
    "x longer than routing": (ShapeError, "topk_idx has 4 rows", lambda: with_topk(x=bf16(5, H))),
    "topk_idx int32": (DtypeError, r"use|\.long\(\)", lambda: with_topk(topk_idx=topk()["topk_idx"].int())),
    "topk_idx too wide": (ShapeError, "1 .. 32", lambda: {"x": x(), "topk_idx": ids(33)}),
    "topk_idx empty": (ShapeError, "0 columns", lambda: {"x": x(), "topk_idx": ids(0)}),
    "topk_idx strided": (ShapeError, "not contiguous", lambda: with_topk(topk_idx=ids(T, K).t())),
    "expert too large": (RoutingError, "= 8", lambda: with_topk(topk_idx=torch.full((T, K), E))),
    "expert below -1": (RoutingError, "= -2", lambda: with_topk(topk_idx=torch.full((T, K), -2))),
    "expert far out": (RoutingError, "allowed", lambda: with_topk(topk_idx=torch.full((T, K), 1 << 62))),
    "expert twice": (RoutingError, "twice", lambda: with_topk(topk_idx=torch.full((T, K), 3))),
    "weights fp64": (DtypeError, r"\.float\(\)", lambda: with_topk(topk_weights=torch.ones(T, K).double())),
    "weights bf16": (DtypeError, r"\.float\(\)", lambda: with_topk(topk_weights=bf16(T, K))),
    "weights of another shape": (ShapeError, r"\[4, 3\]", lambda: with_topk(topk_weights=torch.ones(T, 3))),
    "weights strided": (ShapeError, "not contiguous", lambda: with_topk(topk_weights=torch.ones(K, T).t())),
    "weights alone": (InputError, "without topk_idx", lambda: with_topk(topk_idx=None)),
    "map fp32": (DtypeError, r"\.bool\(\)", lambda: with_map(routing_map=torch.zeros(T, E))),
    "map too narrow": (ShapeError, r"\[4, 7\]", lambda: with_map(routing_map=torch.ones(T, 7).bool())),
    "probs fp64": (DtypeError, r"\.float\(\)", lambda: with_map(probs=torch.ones(T, E).double())),
    "probs alone": (InputError, "without routing_map", lambda: with_map(routing_map=None)),
    "both forms": (InputError, "both forms", lambda: with_topk(**mapped())),
    "handle of nothing": (DtypeError, "handle is int", lambda: with_topk(handle=3)),
    "alignment 0": (InputError, "expert_alignment = 0", lambda: with_topk(expert_alignment=0)),
    "alignment float": (InputError, "expert_alignment = 16.0", lambda: with_topk(expert_alignment=16.0)),
    "unknown layout": (InputError, "layout = 'dense'", lambda: with_topk(layout="dense")),
    "padded compact": (InputError, "allowed is 1", lambda: with_topk(layout="compact", expert_alignment=8)),
    "capacity float": (InputError, "capacity = 8.0", lambda: with_topk(capacity=8.0)),
    "capacity bool": (InputError, "capacity = True", lambda: with_topk(capacity=True)),
    "capacity negative": (InputError, "capacity = -1; allowed is 0", lambda: with_topk(capacity=-1)),
    "capacity too large": (InputError, "allowed is 0 .. 2147483647", lambda: with_topk(capacity=1 << 31)),
    "padded without a capacity": (InputError, "without a cap", lambda: with_topk(pad_to_capacity=True)),
    "max_tokens float": (InputError, "max_tokens = 9.0", lambda: with_topk(capacity=9, max_tokens=9.0)),
    "max_tokens of none": (InputError, "max_tokens = 0; all", lambda: with_topk(capacity=9, max_tokens=0)),
    "max_tokens too few": (ShapeError, "max_tokens = 1", lambda: with_topk(capacity=9, max_tokens=1)),
    "max_tokens without a capacity": (InputError, "without a cap", lambda: with_topk(max_tokens=99)),
    "padded by a number": (InputError, "= 1; allow", lambda: with_topk(capacity=9, pad_to_capacity=1)),
    "unknown output": (InputError, "output_dtype = 'int4'", lambda: with_topk(output_dtype="int4")),
    "bf16 as codes": (
        InputError, "'fp8' with dispatch_dtype = 'bf16'",
        lambda: with_topk(output_dtype="fp8", dispatch_dtype="bf16"),
    ),
    "unknown wire": (InputError, "dispatch_dtype = 'int4'", lambda: with_topk(dispatch_dtype="int4")),
}  # fmt: skip


def assert_usable(buffer: Buffer) -> DispatchResult:
    result = buffer.dispatch(**with_topk())
    out = buffer.combine(result.rows, result.handle)
    assert torch.equal(out, 2 * x())
    return result


@pytest.mark.parametrize("name", BAD_DISPATCH)
def test_dispatch_refuses(group: RankGroup, name: str) -> None:
    error, message, arguments = BAD_DISPATCH[name]

    def refuse(rank: int, buffer: Buffer) -> None:
        launched = buffer.stats()["dispatch.calls"]
        with pytest.raises(error, match=message) as caught:
            buffer.dispatch(**arguments())
        assert isinstance(caught.value, InputError) and isinstance(caught.value, ValueError)
        assert buffer.stats()["dispatch.calls"] == launched
        assert_usable(buffer)

    group.run(refuse)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_tensors_inside_a_transform_of_torch_are_refused(
    group: RankGroup, transform: Callable[..., Any]
) -> None:
    def refuse(rank: int, buffer: Buffer) -> None:
        def call(given: Tensor) -> Tensor:
            return buffer.dispatch(**with_topk(x=given)).rows.float().sum()

        given = x() if transform is torch.func.grad else x()[None]
        with pytest.raises(InputError, match="x, a Tensor, has no memory of its own"):
            transform(call)(given)
        assert_usable(buffer)

    group.run(refuse)


def without_tokens(kind: str, call: Callable[[Tensor], Any]) -> None:
    empty = torch.ones(0, H, dtype=BF16)
    if kind == "fake":
        call(FakeTensorMode().from_tensor(empty))
    elif kind == "grad":
        torch.func.grad(lambda given: call(given).rows.float().sum())(empty)
    else:
        call(masked_tensor(empty.float(), torch.ones(0, H, dtype=torch.bool)))  # takes no bf16


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fake", "grad", "masked"])
def test_wrappers_without_tokens_are_refused_like_those_with_some(group: RankGroup, kind: str) -> None:
    def refuse(rank: int, buffer: Buffer) -> None:
        with pytest.raises(InputError, match=r"x, a \w+, has no memory of its own"):
            without_tokens(kind, lambda given: buffer.dispatch(given, ids(K, 0)))
        assert_usable(buffer)

    group.run(refuse)


def test_tangents_of_forward_mode_autograd_are_refused() -> None:
    """Of one rank: levels are the process's, and ranks are threads here."""

    def refuse(rank: int, buffer: Buffer) -> None:
        result = assert_usable(buffer)
        with forward_ad.dual_level():
            assert_usable(buffer)
            with pytest.raises(InputError, match="x has a tangent"):
                buffer.dispatch(**with_topk(x=forward_ad.make_dual(x(), x())))
            rows = forward_ad.make_dual(result.rows, result.rows.clone())
            with pytest.raises(InputError, match="rows has a tangent"):
                buffer.combine(rows, result.handle)
        assert_usable(buffer)

    with RankGroup(1, {"num_experts": E, "hidden": H}) as alone:
        alone.run(refuse)


def test_every_argument_of_dispatch_is_tested_above() -> None:
    refused = [set(arguments()) for _, _, arguments in BAD_DISPATCH.values()]
    assert set.union(*refused) == {
        "x", "topk_idx", "topk_weights", "routing_map", "probs",
        "handle", "expert_alignment", "dispatch_dtype", "output_dtype", "layout", "capacity",
        "pad_to_capacity", "max_tokens",
    }  # fmt: skip


def test_the_same_arguments_without_the_fault_are_accepted(group: RankGroup) -> None:
    def accept(rank: int, buffer: Buffer) -> None:
        assert_usable(buffer)
        buffer.dispatch(**with_map())
        buffer.dispatch(**with_topk(x=x().float(), dispatch_dtype="bf16"))

    group.run(accept)


@pytest.mark.parametrize("columns", [32, 128])
def test_exponents_of_mxfp8_are_refused_where_one_would_travel(group: RankGroup, columns: int) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        codes = torch.ones(T, columns).to(torch.float8_e4m3fn)
        words = torch.full((T, 1), 0xFF, dtype=torch.int32)
        buffer.dispatch(**with_topk(x=Fp8Rows(codes, words)))
        for word in (0x17F, 0x7F7F7F7F, -1, -(1 << 31)):
            words[2] = word
            said = rf"x\.scales\[2, 0\] = {word & 0xFFFFFFFF:#010x} .* {columns} columns; allowed is one"
            with pytest.raises(InputError, match=said):
                buffer.dispatch(**with_topk(x=Fp8Rows(codes, words)))
        assert_usable(buffer)

    group.run(claim)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_an_integer_of_another_library_is_one_and_a_bool_of_it_is_none(
    group: RankGroup, kind: Callable[[Any], Any], tmp_path: Path
) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        wanted = buffer.dispatch(**with_topk(capacity=40, max_tokens=T, expert_alignment=4))
        got = buffer.dispatch(**with_topk(capacity=kind(40), max_tokens=kind(T), expert_alignment=kind(4)))
        layout = got.handle.row_layout
        assert layout == wanted.handle.row_layout and {type(entry) for entry in layout[1:]} == {int, bool}
        assert torch.equal(got.tokens_per_expert, wanted.tokens_per_expert)
        buffer.dispatch(x(), handle=got.handle, capacity=kind(40))
        with buffer.trace(tmp_path / "run", max_events=kind(9)):
            pass
        no_number = torch.tensor(True) if kind is torch.tensor else np.bool_(True)
        for name in ("capacity", "max_tokens", "expert_alignment"):
            with pytest.raises(InputError, match=f"{name} = .*True"):
                buffer.dispatch(**with_topk(**({"capacity": 40} | {name: no_number})))

    group.run(claim)


BAD_COMBINE: dict[str, tuple[type[Exception], str, Callable[[Tensor], dict[str, Any]]]] = {
    "rows too few": (ShapeError, "the handle's dispatch gave 8", lambda rows: {"rows": rows[:-1]}),
    "rows fp64": (DtypeError, "rows is float64", lambda rows: {"rows": rows.double()}),
    "rows strided": (ShapeError, "not contiguous", lambda rows: {"rows": rows.t().contiguous().t()}),
    "rows freed": (InputError, "has no memory of its own", lambda rows: {"rows": freed(rows.clone())}),
    "rows narrow": (ShapeError, "rows has 48 columns", lambda rows: {"rows": rows[:, :48].contiguous()}),
    "handle missing": (DtypeError, "handle is NoneType", lambda rows: {"rows": rows, "handle": None}),
    "bias short": (
        ShapeError,
        "bias is .3, 256.; allowed is .4, 256.",
        lambda rows: {"rows": rows, "bias": bf16(T - 1, H)},
    ),
    "bias fp32": (DtypeError, "bias is float32", lambda rows: {"rows": rows, "bias": torch.ones(T, H)}),
    "bias strided": (
        ShapeError,
        "bias is not contiguous",
        lambda rows: {"rows": rows, "bias": bf16(H, T).t()},
    ),
    "three biases": (InputError, "at most 2", lambda rows: {"rows": rows, "bias": [bf16(T, H)] * 3}),
    "bias a number": (DtypeError, "bias is int", lambda rows: {"rows": rows, "bias": 1}),
    "sums rounded by a word": (
        InputError,
        "rounds_sums = 'no'; allowed is True | False",
        lambda rows: {"rows": rows.float(), "rounds_sums": "no"},
    ),
    "unknown gradient wire": (
        InputError,
        "grad_dtype = 'int4'",
        lambda rows: {"rows": rows.detach(), "grad_dtype": "int4"},
    ),
    "fp32 gradients as fp8": (
        DtypeError,
        "'fp8' quantises BF16 rows only",
        lambda rows: {"rows": rows.float().requires_grad_(), "grad_dtype": "fp8"},
    ),
}


@pytest.mark.parametrize("name", BAD_COMBINE)
def test_combine_refuses(group: RankGroup, name: str) -> None:
    error, message, arguments = BAD_COMBINE[name]

    def refuse(rank: int, buffer: Buffer) -> None:
        result = assert_usable(buffer)
        with pytest.raises(error, match=message):
            buffer.combine(**{"handle": result.handle, **arguments(result.rows)})
        assert_usable(buffer)

    group.run(refuse)


def test_a_handle_with_other_sizes_or_another_form_is_refused(group: RankGroup) -> None:
    def refuse(rank: int, buffer: Buffer) -> None:
        handle = assert_usable(buffer).handle
        with pytest.raises(ShapeError, match="the handle's plan is for 4"):
            buffer.dispatch(bf16(3, H), handle=handle)
        with pytest.raises(InputError, match="form 'topk'"):
            buffer.dispatch(x(), probs=torch.ones(T, E), handle=handle)
        with pytest.raises(ShapeError, match="topk_weights"):
            buffer.dispatch(x(), topk_weights=torch.ones(T, K + 1), handle=handle)
        with pytest.raises(InputError, match="expert_alignment = 16"):
            buffer.dispatch(x(), handle=handle, expert_alignment=16)
        with pytest.raises(InputError, match="'compact' but the handle has 'expert_major'"):
            buffer.dispatch(x(), handle=handle, layout="compact")
        with pytest.raises(InputError, match="capacity = 8 but the handle has None"):
            buffer.dispatch(x(), handle=handle, capacity=8)
        limited = buffer.dispatch(**with_topk(capacity=7)).handle
        with pytest.raises(InputError, match="capacity = 8 but the handle has 7"):
            buffer.dispatch(x(), handle=limited, capacity=8)
        with pytest.raises(InputError, match="max_tokens = 99 but the handle has None"):
            buffer.dispatch(x(), handle=limited, max_tokens=99)
        with pytest.raises(ShapeError, match="gave 7"):
            buffer.combine(bf16(8, H), limited)
        assert_usable(buffer)

    group.run(refuse)


def test_a_handle_of_another_buffer_is_refused(group: RankGroup) -> None:
    handles = group.run(lambda rank, buffer: assert_usable(buffer).handle)

    def refuse(rank: int, buffer: Buffer) -> None:
        with pytest.raises(InputError, match="another buffer"):
            buffer.dispatch(x(), handle=handles[rank])
        with pytest.raises(InputError, match="another buffer"):
            buffer.combine(bf16(handles[rank].num_rows, H), handles[rank])
        assert_usable(buffer)

    with RankGroup(2, {"num_experts": E, "hidden": H, "domain_size": 1}) as other:
        other.run(refuse)


def test_fp32_rows_need_slots_made_for_them() -> None:
    def refuse(rank: int, buffer: Buffer) -> None:
        with pytest.raises(DtypeError, match=r"max_dtype = 'bf16'.* max_dtype = 'fp32' \(UCCL_EP_MAX"):
            buffer.dispatch(**with_topk(x=x().float(), dispatch_dtype="bf16"))
        assert_usable(buffer)

    with RankGroup(2, {"num_experts": E, "hidden": H, "max_dtype": "bf16"}) as narrow:
        narrow.run(refuse)
