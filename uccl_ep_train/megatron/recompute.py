"""Activation recomputation: the second run of a layer's dispatch uses the plan that the first one saved.

Whether a plan is reused follows from the call structure alone (DESIGN: never from local data), so all ranks
agree. Megatron runs a checkpointed layer first without gradients, later, in backward, once more with them.
Micro-batches go through a layer's backward in the order of its forward, so the plans form a queue per layer.
A layer that a forward pass calls several times goes through backward in the other order: see `is_repeated`.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from typing import Any

import torch
from megatron.core.tensor_parallel.random import is_checkpointing

from uccl_ep_train.errors import EpError


class RecomputeError(EpError):
    """First runs and recomputations of a checkpointed layer do not pair up."""


class Phase(enum.Enum):
    ONCE = "not checkpointed, or no backward will come"
    FIRST = "first run of a checkpointed layer"
    AGAIN = "its recomputation in backward"


def phase(training: bool) -> Phase:
    """Of the call that is being made now. `training`: the layer may be recomputed, unlike in evaluation."""
    if not training or not (is_checkpointing() or _te_checkpointing()):
        return Phase.ONCE
    if not torch.is_grad_enabled():
        return Phase.FIRST
    # Megatron's flag stays set when an exception leaves a checkpoint, so it is not believed alone: a
    # recomputation runs inside of a backward pass.
    return Phase.AGAIN if torch._C._current_graph_task_id() != -1 else Phase.ONCE


def _te_checkpointing() -> bool:
    """TransformerEngine's own checkpoint, which Megatron uses for FP8 layers, has flags of its own. Up to
    2.18 the first is not set in a recomputation, which begins outside of its autocast; the second one is.
    """
    te = sys.modules.get("transformer_engine.pytorch.distributed")
    if te is None:
        return False
    return bool(te.is_fp8_activation_recompute_enabled() or te.in_fp8_activation_recompute_phase())


def is_repeated(layer: Any) -> bool:
    """Whether a forward pass calls an MoE layer several times: multi-token prediction by one layer."""
    config = layer.config
    repeats = getattr(config, "mtp_use_repeated_layer", False) and (config.mtp_num_layers or 0) > 1
    return bool(repeats and getattr(layer.router, "is_mtp_layer", False))


class HandleQueue:
    """The plans of first runs whose recomputation is still to come, oldest first."""

    # More micro-batches in flight than any pipeline has; reached when forward passes are never followed by
    # backward passes in training mode.
    LIMIT = 1024

    def __init__(self) -> None:
        self._handles: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._handles)

    def take(self, now: Phase) -> Any:
        """The saved plan for a recomputation, None for any other call, and where its first run could not be
        told from others. Raises RecomputeError.
        """
        if now is not Phase.AGAIN:
            return None
        if not self._handles:
            # Up to 2.18 TransformerEngine does not tell of a first run whose autocast is inside of it.
            if not is_checkpointing():
                return None
            raise RecomputeError(
                "a layer is recomputed that left no saved plan: was its first run not checkpointed?"
            )
        return self._handles.popleft()

    def keep(self, now: Phase, handle: Any) -> None:
        """Saves the plan of a first run. Raises RecomputeError when they pile up."""
        if now is not Phase.FIRST:
            return
        if len(self._handles) >= self.LIMIT:
            raise RecomputeError(
                f"{self.LIMIT} checkpointed forward passes of a layer without a backward pass; "
                "call model.eval() before forward passes that have none"
            )
        self._handles.append(handle)

    def clear(self) -> None:
        self._handles.clear()
