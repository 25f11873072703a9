"""Time of a step spent in dispatch and combine, forward and backward, for any Megatron dispatcher.

The six stages of every layer's dispatcher are wrapped. Backward is timed by tensor hooks: from the gradient
that enters a stage's output to the one that leaves its input. Autograd runs these nodes one after the other,
so the difference is the stage's own time.

On a CPU this is wall time. On a GPU it is the time between two events on the caller's stream, before and
after what the stage launches. It includes the stage's kernels, waiting for other ranks, and gaps in which the
stream waits for the host. Nothing is synchronised in between, so the step is as fast as without the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from recipes.plan import devices

_STAGES = {
    "dispatch": ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
    "combine": ("combine_preprocess", "token_combine", "combine_postprocess"),
}


KINDS = tuple(_STAGES)
_MOVING = ("token_dispatch", "token_combine")
"""Stages in which rows go from rank to rank, and in which a rank waits for the others."""


class Span(NamedTuple):
    """A stage, forward or backward.

    kind              "dispatch" | "combine"
    moving            rows go from rank to rank in it
    start_ms, end_ms  since `DispatchClock.start()`
    """

    kind: str
    moving: bool
    start_ms: float
    end_ms: float


def sum_ms(spans: Iterable[Span], kind: str) -> float:
    return sum((span.end_ms - span.start_ms for span in spans if span.kind == kind), 0.0)


class DispatchClock:
    """Times of dispatch and combine until `take()` or `spans()`."""

    def __init__(self, moe_layers: Iterable[Any]) -> None:
        self._origin: Any = None
        self._spans: list[tuple[str, bool, Any, Any]] = []  # kind, moving, and the marks at both ends
        for layer in moe_layers:
            for kind, names in _STAGES.items():
                for name in names:
                    stage = getattr(layer.token_dispatcher, name)
                    setattr(layer.token_dispatcher, name, self._timed(kind, name in _MOVING, stage))

    def start(self) -> None:
        """Times of `spans()` count from now."""
        self._origin = devices.mark()
        self._spans.clear()

    def spans(self) -> list[Span]:
        """Spans since `start()`, in the order of their ends, which it then forgets. Waits for the GPU."""
        devices.synchronize()
        taken, self._spans = self._spans, []
        return [
            Span(kind, moving, *(devices.milliseconds(self._origin, mark) for mark in ends))
            for kind, moving, *ends in taken
        ]

    def take(self) -> dict[str, float]:
        """Milliseconds since the last call, by kind; starts again from zero. Waits for the GPU."""
        devices.synchronize()
        taken = dict.fromkeys(_STAGES, 0.0)
        for kind, _, start, end in self._spans:
            taken[kind] += devices.milliseconds(start, end)
        self._spans.clear()
        return taken

    def _timed(self, kind: str, moving: bool, stage: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(hidden: torch.Tensor, *args: Any) -> Any:
            entered: list[Any] = []  # when backward reached this stage's output

            def left(_grad: torch.Tensor) -> None:
                if entered:
                    self._spans.append((kind, moving, entered.pop(), devices.mark()))

            if hidden.requires_grad:
                hidden = hidden.view_as(hidden)  # a node of our own: other users of the tensor are not timed
                hidden.register_hook(left)
            start = devices.mark()
            result = stage(hidden, *args)
            self._spans.append((kind, moving, start, devices.mark()))
            out = result[0] if isinstance(result, tuple) else result
            if out.requires_grad and out is not hidden:
                out.register_hook(lambda _grad: entered.append(devices.mark()) if not entered else None)
            return result

        return wrapper
