"""Dispatch and combine as torch operators: a compiled layer has no graph break, and the bits of an eager one.

Ranks are processes: Dynamo is not made for several threads.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, library
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig, LocalBootstrap
from uccl_ep_train.api import operators
from uccl_ep_train.api.operators import Operators, keep_calls
from uccl_ep_train.errors import ClosedError, DtypeError, InputError, ShapeError

H, E, K, CAPACITY = 128, 4, 2, 40
SHAPES = (5, 9, 0)  # tokens of rank 0; rank 1 has one more


class Layer(torch.nn.Module):
    """Experts that are one matrix, and a second dispatch by the same routing."""

    def __init__(self, calls: Operators, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.calls = calls
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter((torch.randn(H, H, generator=generator) / 8).to(dtype))

    def forward(self, x: Tensor, idx: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        got = self.calls.dispatch(x * 2, idx, probs)
        again = self.calls.dispatch_again(x + 1, got.ticket)
        y = torch.relu(got.rows @ self.weight) * got.row_weights[:, None].to(x.dtype) + again
        return x + self.calls.combine(y, got.ticket, x.shape[0]), got.tokens_per_expert


def inputs(
    rank: int, tokens: int, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    num_tokens = tokens + rank
    idx = torch.rand(num_tokens, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    x = torch.randn(num_tokens, H, generator=generator).to(device, dtype).requires_grad_()
    probs = torch.rand(num_tokens, K, generator=generator).to(device).requires_grad_()
    return [x, idx.to(device), probs]


def config(device: str = "cpu", **settings: Any) -> EpConfig:
    where: dict[str, Any] = {"backend": "host"} if device == "cpu" else {"backend": "cuda", "num_sms": 8}
    return EpConfig(
        num_experts=E, hidden=H, budget_bytes=16 << 20 if device == "cpu" else 128 << 20, **where, **settings
    )


def plain_layer(buffer: Buffer, layer: Layer, x: Tensor, idx: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """The same by the buffer's own calls."""
    got = buffer.dispatch(x * 2, idx, probs, capacity=CAPACITY, pad_to_capacity=True)
    again = buffer.dispatch(x + 1, handle=got.handle)
    assert got.row_weights is not None
    y = torch.relu(got.rows @ layer.weight) * got.row_weights[:, None].to(x.dtype) + again.rows
    return x + buffer.combine(y, got.handle), got.tokens_per_expert


def results(layer: Layer, run: Callable[..., Any], rank: int, tokens: int) -> list[Tensor]:
    """Outputs and gradients."""
    given = inputs(rank, tokens, layer.weight.dtype, layer.weight.device)
    layer.weight.grad = None
    out, counts = run(*given)
    (out * 3).sum().backward()
    assert layer.weight.grad is not None
    found = [out.detach(), counts, layer.weight.grad]
    return found + [given[i].grad for i in (0, 2)]


WHAT = ("out", "counts", "grad of weight", "grad of x", "grad of probs")


def is_rounded_otherwise(name: str, backend: str, what: str, device: str) -> bool:
    """Inductor sums a row in another order than torch, and on GPUs fuses products with sums."""
    return (name, backend) == ("compiled", "inductor") and (what == "grad of probs" or device == "cuda")


def compare(rank: Rank, backend: str, dispatch_dtype: str, domain_size: int, device: str = "cpu") -> int:
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    settings = config(device, dispatch_dtype=dispatch_dtype, domain_size=domain_size)
    with Buffer(rank.group, settings) as buffer:
        # What Inductor fuses it does not round to BF16 in between.
        dtype = torch.float32 if backend == "inductor" else torch.bfloat16
        layer = Layer(Operators(buffer, capacity=CAPACITY), dtype).to(device)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for tokens in SHAPES:
            eager = results(layer, layer, rank.rank, tokens)
            others = {
                "compiled": results(layer, compiled, rank.rank, tokens),
                "plain": results(layer, partial(plain_layer, buffer, layer), rank.rank, tokens),
            }
            for name, other in others.items():
                for what, a, b in zip(WHAT, eager, other, strict=True):
                    same = torch.equal(a, b) or (
                        is_rounded_otherwise(name, backend, what, device)
                        and torch.allclose(a, b, rtol=1e-4 if device == "cuda" else 0.05, atol=1e-5)
                    )
                    assert same, (name, tokens, what, (a - b).abs().max())
        del eager, other, others, compiled, layer
        torch._dynamo.reset()
        gc.collect()
        return operators.num_plans()


@pytest.mark.parametrize(
    ("backend", "dispatch_dtype", "domain_size"),
    [("aot_eager", "bf16", 2), ("aot_eager", "fp8", 1), ("inductor", "bf16", 1)],
)
def test_a_compiled_layer_has_no_graph_break_and_the_bits_of_an_eager_one(
    backend: str, dispatch_dtype: str, domain_size: int
) -> None:
    with ProcessRanks(2, compare, (backend, dispatch_dtype, domain_size)) as ranks:
        for outcome in ranks.outcomes(timeout_s=110).values():
            assert not outcome.error, outcome.trace
            assert outcome.value == 0, "plans outlive their tickets"


def break_graph(rank: Rank) -> None:
    with Buffer(rank.group, config()) as buffer:
        layer = Layer(Operators(buffer, capacity=CAPACITY))
        compiled = torch.compile(partial(plain_layer, buffer, layer), backend="aot_eager", fullgraph=True)
        compiled(*inputs(rank.rank, 5))


def test_the_buffer_s_own_calls_break_the_graph() -> None:
    """Control."""
    with ProcessRanks(1, break_graph, ()) as ranks:
        assert ranks.outcomes(timeout_s=60)[0].error == "Unsupported"


@pytest.fixture
def buffer() -> Any:
    with Buffer(None, config(dispatch_dtype="bf16"), bootstrap=LocalBootstrap.create(1)[0]) as made:
        yield made


def test_operators_are_what_torch_expects_of_them(buffer: Buffer) -> None:
    calls = Operators(buffer, capacity=CAPACITY)
    x, idx, probs = inputs(0, 7)
    ops = torch.ops.uccl_ep
    how = (calls.buffer, CAPACITY, 1, "bf16", 7)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    library.opcheck(ops.dispatch, (x, idx, probs, *how), test_utils=tests)
    got = calls.dispatch(x, idx, probs)
    rows, ticket = got.rows.detach(), got.ticket
    again = (x, ticket, calls.buffer, CAPACITY, "bf16", "bf16")
    library.opcheck(ops.dispatch_again, again, test_utils=tests)
    sums = (rows.requires_grad_(), ticket, calls.buffer, 7, CAPACITY, "bf16")
    library.opcheck(ops.combine, sums, test_utils=tests)


def test_a_layer_is_exported(buffer: Buffer) -> None:
    layer = Layer(Operators(buffer, capacity=CAPACITY))
    given = [tensor.detach() for tensor in inputs(0, 7)]
    exported = torch.export.export(layer, tuple(given)).module()
    for got, wanted in zip(exported(*given), layer(*given), strict=True):
        assert torch.equal(got, wanted)


def step(run: Callable[..., Any], given: list[Tensor]) -> list[Tensor]:
    for tensor in given:
        tensor.grad = None
    out = run(*given)[0]
    out.float().pow(2).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]


def test_a_compiled_checkpoint_repeats_no_call_with_keep_calls(buffer: Buffer) -> None:
    layer, given = Layer(Operators(buffer, capacity=CAPACITY)), inputs(0, 7)
    wanted = step(layer, given)

    def again(*tensors: Tensor, **how: Any) -> Any:
        return checkpoint(layer, *tensors, use_reentrant=False, **how)

    before = buffer.stats()["caller.dispatch.calls"]
    compiled = torch.compile(partial(again, context_fn=keep_calls), backend="aot_eager", fullgraph=True)
    for got, expected in zip(step(compiled, given), wanted, strict=True):
        assert torch.equal(got, expected)
    # Two dispatches of the layer, and one that is the combine's backward.
    assert buffer.stats()["caller.dispatch.calls"] - before == 3
    # Negative control: once torch can do this, nobody needs `keep_calls`.
    with pytest.raises(AssertionError):
        step(torch.compile(again, backend="aot_eager", fullgraph=True), given)


def test_layers_with_operators_of_their_own_share_what_is_compiled(buffer: Buffer) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = [Layer(Operators(buffer, capacity=CAPACITY)) for _ in range(12)]
    with Buffer(None, config(dispatch_dtype="bf16"), bootstrap=LocalBootstrap.create(1)[0]) as other:
        layers.append(Layer(Operators(other, capacity=CAPACITY)))
        given, wanted = inputs(0, 7), []
        for layer in layers:
            wanted.append(step(layer, given))
            layer.compile(backend="aot_eager", fullgraph=True)
        assert len({layer.calls.buffer for layer in layers}) == 2
        for layer, expected in zip(layers, wanted, strict=True):
            assert all(map(torch.equal, step(layer, given), expected))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_saved_tensors_may_be_copied(buffer: Buffer) -> None:
    layer, given = Layer(Operators(buffer, capacity=CAPACITY)), inputs(0, 7)
    wanted = step(layer, given)
    before = operators.num_plans()
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        got = step(layer, given)
    assert all(map(torch.equal, got, wanted))
    assert operators.num_plans() == before


def test_a_second_derivative_is_right_or_refused(buffer: Buffer) -> None:
    calls = Operators(buffer, capacity=CAPACITY)
    x, idx, probs = inputs(0, 7, torch.float32)
    got = calls.dispatch(x, idx, probs)
    gradients = torch.autograd.grad((got.rows**2).sum(), (x, probs), create_graph=True)
    for gradient, given in zip(gradients, (x, probs), strict=True):
        with pytest.raises(InputError, match="a second derivative"):
            torch.autograd.grad(gradient.sum(), given if given is x else (x, probs), retain_graph=True)

    def of_sums(rows: Tensor) -> Tensor:
        sums = calls.combine(rows, got.ticket, len(x))
        return torch.autograd.grad((sums**2).sum(), rows, create_graph=True)[0]

    rows = torch.ones(CAPACITY, H, requires_grad=True)
    along = torch.arange(CAPACITY, dtype=torch.float32)[:, None].expand(CAPACITY, H).clone().requires_grad_()
    (second,) = torch.autograd.grad(of_sums(rows), rows, along)
    assert torch.equal(second, of_sums(along))  # the gradient is linear


@pytest.mark.parametrize("compiles", [False, True])
def test_forward_mode_of_torch_func_is_refused(buffer: Buffer, compiles: bool) -> None:
    layer = Layer(Operators(buffer, capacity=CAPACITY))
    x, idx, probs = (tensor.detach() for tensor in inputs(0, 7))

    def derivative() -> Tensor:
        return torch.func.jvp(lambda rows: layer(rows, idx, probs)[0], (x,), (x,))[1]

    with pytest.raises(InputError, match="allowed is reverse mode"):
        (torch.compile(derivative, backend="aot_eager") if compiles else derivative)()


def test_a_buffer_has_no_copies(buffer: Buffer) -> None:
    class Holder(torch.nn.Module):
        def __init__(self, held: object) -> None:
            super().__init__()
            self.held = held

    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda held: copy.deepcopy(Holder(held))):
        with pytest.raises(InputError, match="a Buffer has no copies"):
            copied(buffer)
    layer, given = (
        Layer(Operators(buffer, capacity=CAPACITY)),
        inputs(0, 7),
    )  # control: these are of any number
    assert all(map(torch.equal, step(copy.deepcopy(layer), given), step(layer, given)))


def test_a_plan_lives_as_long_as_its_ticket(buffer: Buffer) -> None:
    calls = Operators(buffer, capacity=CAPACITY)
    x, idx, probs = (tensor.detach() for tensor in inputs(0, 5))
    before = operators.num_plans()
    got = calls.dispatch(x, idx, probs)
    assert operators.num_plans() == before + 1
    copy = got.ticket.clone()
    view = got.ticket.view(1)
    del got
    assert torch.equal(calls.dispatch_again(x, view), calls.dispatch_again(x, copy))
    del view
    assert operators.num_plans() == before
    calls.dispatch(x, idx, probs)  # drops what is gone
    with pytest.raises(InputError, match="keep that tensor, not a copy"):
        calls.dispatch_again(x, copy)


def test_more_rows_than_the_capacity_are_told(buffer: Buffer) -> None:
    x, idx, probs = (tensor.detach() for tensor in inputs(0, 9))
    assert not Operators(buffer, capacity=18).dispatch(x, idx, probs).overflow
    assert Operators(buffer, capacity=17).dispatch(x, idx, probs).overflow


def test_wrong_arguments_are_refused(buffer: Buffer) -> None:
    with pytest.raises(DtypeError, match="allowed is a Buffer"):
        Operators(object(), capacity=1)  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"capacity": 0}, r"capacity = 0; allowed is 1"),
        ({"capacity": 2.5}, r"capacity = 2\.5; allowed is 1"),
        ({"capacity": "3"}, r"capacity = '3'; allowed is 1"),
        ({"capacity": True}, r"capacity = True; allowed is 1"),
        ({"expert_alignment": 0}, r"expert_alignment = 0; allowed is 1"),
        ({"max_tokens": 0}, r"max_tokens = 0; allowed is 1"),
        ({"dispatch_dtype": "x"}, r"dispatch_dtype = 'x'; allowed is 'fp8'"),
    ]
    for given, text in wrong:
        with pytest.raises(InputError, match=text):
            Operators(buffer, **{"capacity": 1, **given})
    calls = Operators(buffer, capacity=CAPACITY)
    x, idx, probs = (tensor.detach() for tensor in inputs(0, 5))
    got = calls.dispatch(x, idx, probs)
    with pytest.raises(ShapeError, match="num_tokens = 4: the ticket's dispatch had 5"):
        calls.combine(got.rows, got.ticket, 4)
    with pytest.raises(ShapeError, match=f"capacity = 39: the ticket's dispatch had {CAPACITY}"):
        Operators(buffer, capacity=39).dispatch_again(x, got.ticket)
    with pytest.raises(InputError, match="topk_idx"):
        calls.dispatch(x, idx.to(torch.int32), probs)
    for sparse in ((x.to_sparse(), idx, probs), (x, idx.to_sparse(), probs)):
        with pytest.raises(InputError, match=r"is torch\.sparse_coo; allowed is a plain dense tensor"):
            calls.dispatch(*sparse)


def wrapped(tensor: Tensor) -> list[Tensor]:
    """What torch asks for an implementation of its own."""
    strided = torch.nested.nested_tensor([tensor], layout=torch.strided)
    return [TwoTensor(tensor, tensor), masked_tensor(tensor.float(), tensor > 0), strided]


@pytest.mark.filterwarnings("ignore:.*MaskedTensor", "ignore:.*nested tensors")
def test_what_torch_would_not_give_an_operator_is_refused_and_counts(buffer: Buffer) -> None:
    calls = Operators(buffer, capacity=CAPACITY)
    x, idx, probs = (tensor.detach() for tensor in inputs(0, 5))
    got = calls.dispatch(x, idx, probs)
    wrong: list[Callable[[], Any]] = [
        *(partial(calls.dispatch, other, idx, probs) for other in wrapped(x)),
        *(partial(calls.dispatch, x, other, probs) for other in wrapped(idx)[::2]),
        *(partial(calls.dispatch_again, other, got.ticket) for other in wrapped(x)),
        *(partial(calls.combine, other, got.ticket, 5) for other in wrapped(got.rows)),
        *(partial(calls.combine, got.rows, other, 5) for other in (torch.zeros(2), got.ticket.double())),
        lambda: calls.combine(got.rows, got.ticket, 1 << 70),
    ]
    for call in wrong:
        before = buffer._launcher.num_calls()
        with pytest.raises(InputError, match="allowed is"):
            call()
        assert buffer._launcher.num_calls() == before + 1
    assert torch.equal(calls.combine(got.rows, got.ticket, 5), 2 * x)


@pytest.mark.parametrize("compiles", [False, True])
def test_reverse_mode_of_torch_func_is_refused(buffer: Buffer, compiles: bool) -> None:
    layer = Layer(Operators(buffer, capacity=CAPACITY))
    x, idx, probs = (tensor.detach() for tensor in inputs(0, 7))

    def derivative() -> Tensor:
        return torch.func.grad(lambda rows: layer(rows, idx, probs)[0].float().sum())(x)

    with pytest.raises(InputError, match=r"allowed is torch\.autograd\.grad"):
        (torch.compile(derivative, backend="aot_eager") if compiles else derivative)()


def test_numpy_s_integers_are_integers(buffer: Buffer) -> None:
    numbers: Any = {
        "capacity": np.int64(CAPACITY),
        "expert_alignment": np.int32(1),
        "max_tokens": np.uint8(9),
    }
    calls = Operators(buffer, **numbers)
    x, idx, probs = (tensor.detach() for tensor in inputs(0, 5))
    got = calls.dispatch(x, idx, probs)
    given: Any
    for given in (5, np.int64(5)):
        assert torch.equal(calls.combine(got.rows, got.ticket, given), 2 * x)
    for given in (True, np.bool_(True), 5.0):
        with pytest.raises(DtypeError, match=r"num_tokens is .*; allowed is int"):
            calls.combine(got.rows, got.ticket, given)


def test_operators_of_a_buffer_that_is_gone_say_so() -> None:
    with Buffer(None, config(dispatch_dtype="bf16"), bootstrap=LocalBootstrap.create(1)[0]) as made:
        calls = Operators(made, capacity=CAPACITY)
    x, idx, probs = (tensor.detach() for tensor in inputs(0, 5))
    with pytest.raises(ClosedError, match="the buffer is closed"):
        calls.dispatch(x, idx, probs)
    del made
    gc.collect()
    with pytest.raises(ClosedError, match="is gone"):
        calls.dispatch(x, idx, probs)
