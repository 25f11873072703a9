"""Backward under the odd but legal things that programs do to graphs. Values: `test_dispatch_combine.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import RankGroup
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.core.autograd import plain
from uccl_ep_train.core.routing import is_aligned
from uccl_ep_train.errors import InputError

T, H, K, E = 5, 128, 2, 8


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with RankGroup(4, {"num_experts": E, "hidden": H, "domain_size": 2, "dispatch_dtype": "bf16"}) as ranks:
        yield ranks


def inputs(rank: int, num_tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, H, generator=generator)
    idx = torch.rand(num_tokens, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    return x.requires_grad_(), idx, torch.rand(num_tokens, K, generator=generator).requires_grad_()


def backward_calls(buffer: Buffer) -> tuple[float, float]:
    stats = buffer.stats()
    return stats["caller.dispatch_backward.calls"], stats["caller.combine_backward.calls"]


def on_all(group: RankGroup, claim: Callable[[int, Buffer], None]) -> None:
    group.run(claim)


def test_rows_without_gradient_count_as_zero(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        buffer.dispatch(x, idx, weights).row_weights.sum().backward()
        assert torch.equal(weights.grad, torch.ones(T, K))
        assert torch.equal(x.grad, torch.zeros(T, H))

    on_all(group, claim)


def test_weights_without_gradient_count_as_zero(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        buffer.dispatch(x, idx, weights).rows.sum().backward()
        assert torch.equal(x.grad, torch.full((T, H), 2.0))
        assert torch.equal(weights.grad, torch.zeros(T, K))

    on_all(group, claim)


def test_ranks_that_need_different_gradients_run_the_same_backward(group: RankGroup) -> None:
    """x requires a gradient on even ranks, the weights on odd ones."""

    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        (weights if rank % 2 == 0 else x).requires_grad_(False)
        result = buffer.dispatch(x, idx, weights)
        (result.rows.sum() + 3 * result.row_weights.sum()).backward()
        if rank % 2 == 0:
            assert torch.equal(x.grad, torch.full((T, H), 2.0)) and weights.grad is None
        else:
            assert torch.equal(weights.grad, torch.full((T, K), 3.0)) and x.grad is None

    on_all(group, claim)


def test_dispatch_without_weights_has_no_row_weights_and_a_gradient_of_x(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, _ = inputs(rank)
        result = buffer.dispatch(x, idx)
        assert result.row_weights is None
        result.rows.sum().backward()
        assert torch.equal(x.grad, torch.full((T, H), 2.0))

    on_all(group, claim)


def test_ranks_without_tokens_take_part_in_the_backward(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank, num_tokens=T if rank == 2 else 0)
        result = buffer.dispatch(x, idx, weights)
        buffer.combine(result.rows, result.handle).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
        assert weights.grad.shape == weights.shape

    on_all(group, claim)


def test_expanded_and_strided_gradients_are_accepted(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        result = buffer.dispatch(x, idx, weights)
        out = buffer.combine(result.rows, result.handle)
        strided = torch.arange(T * H, dtype=torch.float32).reshape(H, T).t()
        (out * 1).backward(strided)  # strided for combine
        expected = 2 * strided.contiguous()
        assert torch.equal(x.grad, expected)
        x.grad = None
        buffer.dispatch(x, idx, weights).rows.sum().backward()  # expanded for dispatch
        assert torch.equal(x.grad, torch.full((T, H), 2.0))

    on_all(group, claim)


def through(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity, whose gradients are of another kind."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return change(gradient)

    return Changed.apply


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda gradient: torch._neg_view(gradient.neg()),
    "sparse": Tensor.to_sparse,
    "sparse rows": lambda gradient: gradient.to_sparse(1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_other_kinds_count_as_what_they_mean(group: RankGroup, kind: str) -> None:
    change = through(KINDS[kind])

    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        found = []
        for wrapped in (torch.clone, change):
            got = buffer.dispatch(x, idx, weights)
            assert got.row_weights is not None
            rows = wrapped(got.rows) * wrapped(got.row_weights)[:, None]
            out = wrapped(buffer.combine(rows, got.handle))
            found.append(torch.autograd.grad(out.square().sum(), (x, weights)))
        assert all(map(torch.equal, *found))

    on_all(group, claim)


def test_zeros_without_memory_are_gradients_of_zero(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        for combines in (False, True):
            got = buffer.dispatch(x, idx, weights)
            out = buffer.combine(got.rows, got.handle) if combines else got.rows
            of_x, *_ = torch.autograd.grad(out, x, torch._efficientzerotensor(out.shape))
            assert torch.equal(of_x, torch.zeros_like(x))

    on_all(group, claim)


def test_batches_of_gradients_are_refused() -> None:
    """Of one rank: torch.func's levels are a thread's, and backward runs on another."""

    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        got = buffer.dispatch(x, idx, weights)
        out = buffer.combine(got.rows, got.handle)
        for result, given in ((got.rows, x), (got.row_weights, weights), (out, got.rows)):
            batch = torch.ones(2, *result.shape)
            with pytest.raises(InputError, match="has no memory of its own"):
                torch.autograd.grad(result, given, batch, is_grads_batched=True, retain_graph=True)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full((T, H), 2.0))

    with RankGroup(1, {"num_experts": E, "hidden": H, "dispatch_dtype": "bf16"}) as alone:
        on_all(alone, claim)


def take_gradients_under_way(rank: Rank) -> None:
    from torch.distributed._functional_collectives import all_reduce  # takes a second

    def reduce(given: Tensor) -> Tensor:
        started: Tensor = all_reduce(given.contiguous(), "sum", dist.group.WORLD)
        assert type(started) is not Tensor
        return started

    reduced = through(reduce)
    x, _, weights = inputs(rank.rank)
    idx = torch.tensor([[0, E // 2]] * T)
    with Buffer(rank.group, EpConfig(num_experts=E, hidden=H, budget_bytes=16 << 20)) as buffer:
        got = buffer.dispatch(x, idx, weights, dispatch_dtype="bf16")
        out = buffer.combine(reduced(got.rows), got.handle)
        (reduced(out).sum() + reduced(got.row_weights).sum()).backward()
        assert torch.equal(x.grad, torch.full((T, H), 8.0))
        assert torch.equal(weights.grad, torch.full((T, K), 2.0))
        with pytest.raises(InputError, match=r"x is the result of a collective under way; pass x\.wait"):
            buffer.dispatch(reduce(x.detach()), idx, dispatch_dtype="bf16")
        buffer.dispatch(reduce(x.detach()).wait(), idx, dispatch_dtype="bf16")


def test_gradients_may_be_results_of_collectives_under_way() -> None:
    with ProcessRanks(2, take_gradients_under_way) as ranks:
        ranks.results()


def test_results_may_be_changed_in_place_and_inputs_too(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        hidden = x * 1
        result = buffer.dispatch(hidden, idx, weights)
        hidden.zero_()
        out = buffer.combine(result.rows.mul_(3), result.handle)
        out += 1
        out.sum().backward()
        assert torch.equal(x.grad, torch.full((T, H), 6.0))

    on_all(group, claim)


def test_without_gradients_nothing_is_attached_and_no_backward_runs(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        before = backward_calls(buffer)
        x, idx, weights = inputs(rank)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                result = buffer.dispatch(x, idx, weights)
                out = buffer.combine(result.rows, result.handle)
            assert not (result.rows.requires_grad or result.row_weights.requires_grad or out.requires_grad)
        result = buffer.dispatch(x.detach(), idx, weights.detach())
        assert not result.rows.requires_grad
        assert backward_calls(buffer) == before

    on_all(group, claim)


def test_a_graph_that_is_kept_can_be_run_again(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        result = buffer.dispatch(x, idx, weights)
        loss = buffer.combine(result.rows, result.handle).sum()
        before = backward_calls(buffer)
        loss.backward(retain_graph=True)
        loss.backward()
        assert torch.equal(x.grad, torch.full((T, H), 4.0))
        assert backward_calls(buffer) == (before[0] + 2, before[1] + 2)

    on_all(group, claim)


def test_a_second_derivative_is_refused_not_wrong(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        bias = torch.ones(T, H, requires_grad=True)
        result = buffer.dispatch(x, idx, weights)
        out = buffer.combine(result.rows, result.handle, bias=(bias, bias))
        for made, given in ((result.rows, x), (result.row_weights, weights), (out, x), (out, bias)):
            (gradient,) = torch.autograd.grad((made**2).sum(), given, create_graph=True)
            with pytest.raises(InputError, match="a second derivative"):
                gradient.sum().backward()
            # On its way to these inputs alone, which torch's own guard is not on.
            for other in (x, bias) if made is out else (given,):
                with pytest.raises(InputError, match="a second derivative"):
                    torch.autograd.grad(gradient.sum(), other)

    on_all(group, claim)


def test_a_gradient_that_depends_on_no_input_has_no_second_derivative(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        rows = buffer.dispatch(x, idx, weights).rows
        (gradient,) = torch.autograd.grad(rows.sum(), x, create_graph=True)
        assert not gradient.requires_grad and torch.equal(gradient, torch.full((T, H), 2.0))

    on_all(group, claim)


def test_async_results_are_attached_and_waits_may_come_in_any_order(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        first = buffer.dispatch_async(x, idx, weights)
        second = buffer.dispatch_async(2 * x, idx, weights)
        assert first.handle.num_rows == first.num_rows == int(first.tokens_per_expert.sum())
        rows_of_second, rows_of_first = second.wait().rows, first.wait().rows
        assert torch.equal(rows_of_second, 2 * rows_of_first)
        assert first.wait() is first.wait()
        pending = [buffer.combine_async(result.wait().rows, result.handle) for result in (first, second)]
        with torch.no_grad():  # Decided at the call, not at the wait.
            outputs = [entry.wait() for entry in reversed(pending)]
        sum(out.sum() for out in outputs).backward()
        assert torch.equal(x.grad, torch.full((T, H), 6.0))

    on_all(group, claim)


def test_backward_has_the_order_of_the_calls_also_where_ranks_wait_in_different_ones(
    group: RankGroup,
) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        given = [inputs(rank, num_tokens) for num_tokens in (T, T + 1)]
        calls = [buffer.dispatch_async(*each) for each in given]
        got = {n: calls[n].wait() for n in ((0, 1) if rank % 2 == 0 else (1, 0))}
        sums = [buffer.combine_async(got[n].rows, got[n].handle) for n in (0, 1)]
        out = {n: sums[n].wait() for n in ((0, 1) if rank < 2 else (1, 0))}
        (out[0].sum() + 3 * out[1].sum()).backward()
        for (x, *_), factor in zip(given, (1, 3), strict=True):
            assert torch.equal(x.grad, torch.full_like(x, factor * K))

    on_all(group, claim)


def test_a_cached_dispatch_is_differentiable_in_new_weights(group: RankGroup) -> None:
    def claim(rank: int, buffer: Buffer) -> None:
        x, idx, weights = inputs(rank)
        with torch.no_grad():
            handle = buffer.dispatch(x, idx, weights).handle
        result = buffer.dispatch(x, topk_weights=weights, handle=handle)
        assert result.handle is handle
        (result.rows.sum() + 5 * result.row_weights.sum()).backward()
        assert torch.equal(x.grad, torch.full((T, H), 2.0))
        assert torch.equal(weights.grad, torch.full((T, K), 5.0))

    on_all(group, claim)


def test_gradients_that_begin_inside_a_row_are_copied_to_where_kernels_can_read_them() -> None:
    odd = torch.arange(257, dtype=torch.bfloat16)[1:].view(2, 128)
    assert not is_aligned(odd) and is_aligned(plain(odd)) and plain(odd).equal(odd)
    even = torch.ones(2, 128)
    assert plain(even) is even
