"""Runs on the ranks: ways of training that recomputations have to survive, with the gradients they give."""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.megatron.settings import TrainCase
from tests.megatron.training_case import batches_of, build, initialize, moe_layers
from uccl_ep_train.megatron import dispatcher, plugin

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
# Configuration of Megatron's recomputation, and of torch's around each MoE layer: None or whether reentrant.
MODES: dict[str, tuple[dict[str, Any], bool | None]] = {
    "none": ({}, None),
    "full": (FULL, None),
    "selective": (SELECTIVE, None),
    "torch, reentrant": ({}, True),
    "torch, not reentrant": ({}, False),
    "torch inside of full": (FULL, False),
}
Gradients = list[torch.Tensor]


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1)
    loss: torch.Tensor = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
    return loss


def _decoded(model: Any, tokens: torch.Tensor, times: int) -> torch.Tensor:
    """Hidden states after so many passes through all layers."""
    gpt = model.module
    tokens = tokens[:, :-1]
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
    hidden: torch.Tensor = gpt.embedding(input_ids=tokens, position_ids=positions)
    for _ in range(times):
        hidden = gpt.decoder(hidden_states=hidden, attention_mask=None)
    return hidden.float()


def in_order(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Both forward passes before both backward ones."""
    for loss in [loss_of(model, a), loss_of(model, b)]:
        loss.backward()


def last_first(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    first, second = loss_of(model, a), loss_of(model, b)
    second.backward()
    first.backward()


def one_backward_of_two(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """As for a reward model: chosen and rejected."""
    (loss_of(model, a) - 0.5 * loss_of(model, b)).backward()


def backward_twice(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Without Megatron's loss, whose backward works once."""
    square = _decoded(model, a, 1).pow(2).mean()
    square.backward(retain_graph=True)
    loss_of(model, b).backward()
    square.backward()


def no_grad_first(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """In train() mode, as for old log-probabilities."""
    with torch.no_grad():
        loss_of(model, b)
    loss_of(model, a).backward()


def loss_thrown_away(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    loss_of(model, b)
    loss_of(model, a).backward()


def called_twice(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Layers shared in depth."""
    _decoded(model, a, 2).pow(2).mean().backward()


def lengths_by_rank(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    length = 8 + 5 * dist.get_rank()
    last_first(model, a[:, :length], b[:, length // 2 :])


def error_inside(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Between dispatch and combine of the last layer, on all ranks; the next batch is trained on."""
    experts = moe_layers(model)[-1].experts
    with unittest.mock.patch.object(experts, "forward", side_effect=ArithmeticError("on purpose")):
        try:
            loss_of(model, b)
        except ArithmeticError as error:
            seen = error  # with its traceback, and what hangs on it
    loss_of(model, a).backward()
    del seen


def other_optimizer_between(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Of a discriminator, say."""
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss = loss_of(model, a)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    loss.backward()


def optimizer_inside_backward(model: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """A step for each parameter as soon as it has its gradient."""
    hooks = []
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1e-3)
        hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(_step, optimizer)))
    loss_of(model, a).backward()
    for hook in hooks:
        hook.remove()


def _step(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()


# The last one changes the parameters.
WAYS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], None]] = {
    way.__name__: way
    for way in (
        in_order, last_first, one_backward_of_two, backward_twice, no_grad_first, loss_thrown_away,
        called_twice, lengths_by_rank, error_inside, other_optimizer_between, optimizer_inside_backward,
    )
}  # fmt: skip


def _checkpointed(forward: Any, reentrant: bool | None, hidden: torch.Tensor, **kwargs: Any) -> Any:
    return checkpoint(functools.partial(forward, **kwargs), hidden, use_reentrant=reentrant)


@contextlib.contextmanager
def _model(mode: str, name: str, **options: Any) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """A model that recomputes in this mode, with the dispatcher `name`, and two batches of tokens."""
    plugin.disable()
    initialize(1, 4, 1)
    config, reentrant = MODES[mode]
    case = TrainCase(config=config, dispatcher=name, options=options)
    try:
        model, _, _ = build(case)
        for layer in moe_layers(model) if reentrant is not None else []:
            layer.forward = functools.partial(_checkpointed, layer.forward, reentrant)
        batches = batches_of(case, 0)
        yield model, next(batches), next(batches)
    finally:
        plugin.disable()
        dist.barrier()


def _results(mode: str, name: str, ways: list[str], **options: Any) -> dict[str, Gradients]:
    found = {}
    with _model(mode, name, **options) as (model, a, b):
        for way in ways:
            model.zero_grad_buffer()
            WAYS[way](model, a, b)
            found[way] = [p.main_grad.clone() for p in model.parameters()]
        found["parameters"] = [p.detach().clone() for p in model.parameters()]
    return found


class Counted:
    """Dispatches of our managers: `calls`, and of these `reused` with a saved plan."""

    def __init__(self) -> None:
        self.calls = self.reused = 0

    def saved_plan(self, caller: Any) -> Any:
        plan = _saved_plan(caller)
        self.calls += 1
        self.reused += plan is not None
        return plan


_saved_plan = dispatcher.saved_plan


def compare(rank: int, mode: str, reuse: bool) -> dict[str, Any]:
    """Whether each way gives the gradients of all-to-all, and how many dispatches had a saved plan."""
    counted = Counted()
    ways = list(WAYS)
    stock = _results(mode, "alltoall", ways)
    with unittest.mock.patch.object(dispatcher, "saved_plan", counted.saved_plan):
        ours = _results(mode, "uccl_ep", ways, reuse_plans_in_recompute=reuse)
    equal = {name: all(map(torch.equal, ours[name], stock[name])) for name in stock}
    silent = [way for way in ways if not any(bool(g.any()) for g in stock[way])]
    return {"differ": [n for n, same in equal.items() if not same], "without gradients": silent} | {
        "calls": counted.calls,
        "reused": counted.reused,
    }


def paired_by_arrival(rank: int, way: str) -> str:
    """Control: the error of a way where a recomputation takes the oldest plan of its layer."""
    plans: dict[Any, deque[Any]] = defaultdict(deque)

    def save_plan(caller: Any, plan: Any) -> None:
        if not torch.is_grad_enabled():
            plans[caller].append(plan)

    def saved_plan(caller: Any) -> Any:
        return plans[caller].popleft() if torch.is_grad_enabled() and plans[caller] else None

    with (
        unittest.mock.patch.multiple(dispatcher, save_plan=save_plan, saved_plan=saved_plan),
        _model("full", "uccl_ep") as (model, a, b),
    ):
        try:
            WAYS[way](model, a, b)
        except Exception as error:
            return type(error).__name__
    return ""


def thrown_away(rank: int, mode: str, losses: int, keep: bool = False) -> dict[str, int]:
    """How many plans live while a loss does, and the most that live after one has been thrown away.

    keep: a fault, something that holds on to all plans
    """
    kept = []
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    save_plan = dispatcher.save_plan

    def save(caller: Any, plan: Any) -> None:
        alive.add(plan)
        if keep:
            kept.append(plan)
        save_plan(caller, plan)

    after = []
    with (
        unittest.mock.patch.object(dispatcher, "save_plan", save),
        _model(mode, "uccl_ep") as (model, a, _),
    ):
        for _ in range(losses):
            loss = loss_of(model, a[:1, :5])
            during = len(alive)
            del loss
            after.append(len(alive))
    return {"during": during, "after": max(after)}
