"""Which calls of a layer are first runs and which recomputations, as both libraries' checkpoints tell."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

recompute = pytest.importorskip("uccl_ep_train.megatron.recompute")
HandleQueue, Phase, phase = recompute.HandleQueue, recompute.Phase, recompute.phase

pytestmark = pytest.mark.megatron


class InBackward(torch.autograd.Function):
    """Calls `seen` in backward, with gradients enabled, as a checkpoint's recomputation is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: Any) -> torch.Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.seen()
        return grad, None


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """TransformerEngine's two flags."""
    flags = SimpleNamespace(enabled=False, again=False)
    module = SimpleNamespace(
        is_fp8_activation_recompute_enabled=lambda: flags.enabled,
        in_fp8_activation_recompute_phase=lambda: flags.again,
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", module)
    return flags


@pytest.mark.parametrize("enabled_again", [False, True], ids=["up to 2.18", "since"])
def test_transformer_engines_recomputation_takes_the_plan_of_its_first_run(
    te: SimpleNamespace, enabled_again: bool
) -> None:
    queue, taken = HandleQueue(), list[Any]()
    te.enabled = True
    with torch.no_grad():
        assert phase(True) is Phase.FIRST
        queue.keep(phase(True), "plan")
    te.enabled, te.again = enabled_again, True
    leaf = torch.ones(1, requires_grad=True)
    InBackward.apply(leaf, lambda: taken.append(queue.take(phase(True)))).backward()
    assert taken == ["plan"] and len(queue) == 0


def test_a_recomputation_whose_first_run_nobody_told_of_makes_a_plan_of_its_own(
    te: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = HandleQueue()
    with torch.no_grad():  # TransformerEngine up to 2.18, with its autocast inside of the checkpoint
        assert phase(True) is Phase.ONCE
    assert queue.take(Phase.AGAIN) is None
    # Megatron's own checkpoint tells of every one.
    monkeypatch.setattr(recompute, "is_checkpointing", lambda: True)
    with pytest.raises(recompute.RecomputeError, match="left no saved plan"):
        queue.take(Phase.AGAIN)


@pytest.mark.parametrize(
    ("config", "is_mtp", "repeated"),
    [
        ({"mtp_use_repeated_layer": True, "mtp_num_layers": 2}, True, True),
        ({"mtp_use_repeated_layer": True, "mtp_num_layers": 2}, False, False),
        ({"mtp_use_repeated_layer": True, "mtp_num_layers": 1}, True, False),
        ({"mtp_use_repeated_layer": False, "mtp_num_layers": 2}, True, False),
        ({"mtp_num_layers": None}, False, False),
    ],
)
def test_a_layer_that_predicts_several_tokens_is_called_several_times(
    config: dict[str, Any], is_mtp: bool, repeated: bool
) -> None:
    layer = SimpleNamespace(config=SimpleNamespace(**config), router=SimpleNamespace(is_mtp_layer=is_mtp))
    assert recompute.is_repeated(layer) is repeated
