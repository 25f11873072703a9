"""torch.compile ends its regions before our calls: it compiles nothing of ours, and nothing within a call.

Ranks are processes: Dynamo is not made for several threads.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uccl_ep_train
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer, DispatchHandle, EpConfig, deep_ep
from uccl_ep_train.api.low_latency import LowLatency, Sent
from uccl_ep_train.api.weights import combine_weights
from uccl_ep_train.common import opaque
from uccl_ep_train.deep_ep.low_latency import LowLatencyCalls

H, E, K = 128, 4, 2
PACKAGE = str(Path(uccl_ep_train.__file__).parent)
SHAPES = (5, 9, 0)  # tokens of rank 0; rank 1 has one more


def layer(buffer: Buffer, x: Tensor, idx: Tensor, probs: Tensor, weight: Tensor) -> Tensor:
    got = buffer.dispatch(x * 2, idx, probs, dispatch_dtype="bf16")
    y = torch.relu(got.rows @ weight) * got.row_weights[:, None]
    return x + buffer.combine(y, got.handle)


LAYER_CALLS = 2


def every_call(buffer: Buffer, x: Tensor, idx: Tensor, probs: Tensor, weight: Tensor) -> Tensor:
    buffer.check()
    pending = buffer.dispatch_async(x * 2, idx, probs, dispatch_dtype="bf16")
    doubled = weight * 2
    got = pending.wait()
    y = torch.relu(got.rows @ doubled) * got.row_weights[:, None]
    buffer.wake()
    sent = buffer.combine_async(y, got.handle)
    z = x + 1
    out = sent.wait()
    buffer.stats()
    return z + out


EVERY_CALLS = 7


def inputs(rank: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    num_tokens = tokens + rank
    idx = torch.rand(num_tokens, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    rest = [torch.randn(shape, generator=generator) for shape in ((num_tokens, H), (num_tokens, K), (H, H))]
    x, probs, weight = (tensor.requires_grad_() for tensor in rest)
    return [x, idx, probs, weight]


class Watched:
    """torch.compile from a clean start; the files and names of what it compiles."""

    def __init__(self) -> None:
        import torch._dynamo

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.compiled: list[tuple[str, str]] = []
        self._hook = torch._dynamo.convert_frame.register_bytecode_hook(
            lambda code, _: self.compiled.append((code.co_filename, code.co_name))
        )

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def breaks(self) -> int:
        return sum(torch._dynamo.utils.counters["graph_break"].values())

    def ours(self) -> list[str]:
        return [name for file, name in self.compiled if file.startswith(PACKAGE)]


def compare(rank: Rank, buffer: Buffer, form: Callable[..., Tensor], compiled: Any, tokens: int) -> None:
    """Output and gradients of both."""
    found = []
    for run in (form, compiled):
        given = inputs(rank.rank, tokens)
        out = run(buffer, *given)
        (out * 3).sum().backward()
        found.append([out.detach(), *(given[i].grad for i in (0, 2, 3))])
    for eager, other in zip(*found, strict=True):
        assert torch.equal(eager, other), f"{tokens} tokens: {(eager - other).abs().max()}"


def new_buffer(rank: Rank, progress_timeout_s: float = 2) -> Buffer:
    config = EpConfig(
        num_experts=E,
        hidden=H,
        backend="host",
        budget_bytes=16 << 20,
        progress_timeout_s=progress_timeout_s,
        domain_size=1,
    )
    return Buffer(rank.group, config)


def compile_calls(rank: Rank, backend: str, form: Callable[..., Tensor], calls: int) -> None:
    with new_buffer(rank) as buffer, Watched() as watched:
        compiled = torch.compile(form, backend=backend)
        for tokens in SHAPES:
            # One rank compiles later: the others wait for it to enter, which is no lack of progress.
            time.sleep(0.2 * rank.rank)
            compare(rank, buffer, form, compiled, tokens)
            if tokens == SHAPES[0]:
                assert watched.breaks() == calls, torch._dynamo.utils.counters
                assert len(watched.compiled) == calls + 1
        assert watched.ours() == []


@pytest.mark.parametrize(
    ("backend", "form", "calls"), [("eager", every_call, EVERY_CALLS), ("aot_eager", layer, LAYER_CALLS)]
)
def test_each_call_is_one_graph_break_and_values_stay(
    backend: str, form: Callable[..., Tensor], calls: int
) -> None:
    with ProcessRanks(2, compile_calls, (backend, form, calls)) as ranks:
        ranks.results()


def step(buffer: Buffer, *given: Tensor) -> Tensor:
    out = layer(buffer, *given)
    (out * 3).sum().backward()
    return out


def compile_backward(rank: Rank, compiled_autograd: bool) -> None:
    torch._dynamo.config.compiled_autograd = compiled_autograd
    with new_buffer(rank) as buffer, Watched() as watched:
        found = []
        for run in (step, torch.compile(step, backend="eager")):
            given = inputs(rank.rank, 5)
            found.append([run(buffer, *given).detach(), *(given[i].grad for i in (0, 2, 3))])
        for eager, other in zip(*found, strict=True):
            # Compiled autograd adds what autograd adds in another order.
            assert torch.allclose(eager, other, rtol=1e-5) if compiled_autograd else torch.equal(eager, other)
        assert watched.compiled
        assert watched.ours() == []


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_a_backward_inside_is_not_traced(compiled_autograd: bool) -> None:
    with ProcessRanks(2, compile_backward, (compiled_autograd,)) as ranks:
        ranks.results()


def ask_for_full_graph(rank: Rank) -> None:
    with new_buffer(rank) as buffer:
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="it works with other ranks"):
            compiled(buffer, *inputs(rank.rank, 5))
        compare(rank, buffer, layer, layer, 5)  # nothing was launched


def test_fullgraph_raises_torchs_error_and_launches_nothing() -> None:
    with ProcessRanks(2, ask_for_full_graph) as ranks:
        ranks.results()


def compile_what_is_not_opaque(rank: Rank) -> list[str]:
    evaluator = torch._C._dynamo.eval_frame
    default = evaluator._FrameAction.DEFAULT
    # Here a rank compiles within its call, and the other one waits for that.
    with new_buffer(rank, progress_timeout_s=60) as buffer, Watched() as watched:
        vars(Buffer.dispatch).clear()
        evaluator.set_code_exec_strategy(
            Buffer.dispatch.__code__, evaluator._FrameExecStrategy(default, default)
        )
        vars(Buffer._dispatched).clear()
        compiled = torch.compile(layer, backend="eager")
        compiled(buffer, *inputs(rank.rank, 5))
        return watched.ours()


def test_a_call_that_is_not_opaque_would_be_compiled() -> None:
    """Negative control."""
    with ProcessRanks(2, compile_what_is_not_opaque) as ranks:
        assert all(ranks.results())


# ---- opaque() itself


def helper(x: Tensor) -> Tensor:
    return x * 3


def call(x: Tensor) -> Tensor:
    return helper(x) + 1


def opaque_call(x: Tensor) -> Tensor:
    return call(x)


def wrapped_call(x: Tensor) -> Tensor:
    return call(x)


def compiled_around(function: Callable[[Tensor], Tensor]) -> list[str]:
    """What is compiled of the test's own."""
    with Watched() as watched:
        compiled = torch.compile(lambda x: function(x * 2) * 2, backend="eager")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 14.0))
        return [name for file, name in watched.compiled if file == __file__]


def test_neither_a_call_nor_what_it_calls_is_compiled() -> None:
    names = compiled_around(opaque.opaque(opaque_call))
    assert len(names) == 2  # before and after
    assert not {"opaque_call", "call", "helper"} & set(names)


def test_so_it_is_where_torch_has_no_strategies_for_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opaque, "_skip_frames", lambda function: False)
    hidden = opaque.opaque(wrapped_call)
    assert hidden is not wrapped_call
    assert not {"wrapped_call", "call", "helper"} & set(compiled_around(hidden))


def test_what_is_not_opaque_is_compiled() -> None:
    """Negative control: in one piece."""
    assert compiled_around(call) == ["<lambda>"]


def test_properties_and_methods_of_a_class_are_opaque() -> None:
    methods = [
        *((Buffer, name) for name in ("__init__", "dispatch", "combine_async", "close", "_dispatched")),
        *((LowLatency, name) for name in ("dispatch", "send_combine", "masked_ranks")),
        (Sent, "receive"),
        *((deep_ep.Buffer, name) for name in ("dispatch", "combine", "get_dispatch_layout")),
        (LowLatencyCalls, "low_latency_dispatch"),
        *((deep_ep.ElasticBuffer, name) for name in ("dispatch", "combine", "barrier")),
    ]
    for owner, name in methods:
        assert vars(vars(owner)[name])["_torchdynamo_disable"], (owner, name)
    assert vars(combine_weights)["_torchdynamo_disable"]
    assert vars(Buffer.closed.fget)["_torchdynamo_disable"]
    assert vars(vars(DispatchHandle)["num_rows"].func)["_torchdynamo_disable"]


def test_import_and_calls_leave_dynamo_alone() -> None:
    """Importing torch._dynamo takes seconds."""
    program = """
import sys, torch
from uccl_ep_train import Buffer, EpConfig, LocalBootstrap
config = EpConfig(num_experts=2, hidden=128, backend="host", budget_bytes=16 << 20, dispatch_dtype="bf16")
with Buffer(None, config, bootstrap=LocalBootstrap.create(1)[0]) as buffer:
    got = buffer.dispatch(torch.ones(3, 128, requires_grad=True), torch.zeros(3, 1, dtype=torch.int64))
    buffer.combine(got.rows, got.handle).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
