"""Time of a step spent in dispatch and combine, forward and backward, for any Megatron dispatcher.

The six stages of every layer's dispatcher are wrapped. Backward is timed by tensor hooks: from the gradient
that enters a stage's output to the one that leaves its input. Autograd runs these nodes one after the other,
so the difference is the stage's own time.

On a CPU this is wall time. On a GPU it is the time between two events on the caller's stream, before what the
stage launches and after it: its kernels, waiting for other ranks, and gaps in which the stream waits for the
host. Nothing is synchronised in between, so the step is as fast as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from recipes import devices

_STAGES = {
    "dispatch": ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
    "combine": ("combine_preprocess", "token_combine", "combine_postprocess"),
}


class DispatchClock:
    """Sums milliseconds of dispatch and combine until `take()`."""

    def __init__(self, moe_layers: Iterable[Any]) -> None:
        self._spans: list[tuple[str, Any, Any]] = []  # kind, and the marks at both ends
        for layer in moe_layers:
            for kind, names in _STAGES.items():
                for name in names:
                    stage = getattr(layer.token_dispatcher, name)
                    setattr(layer.token_dispatcher, name, self._timed(kind, stage))

    def take(self) -> dict[str, float]:
        """Milliseconds since the last call, by kind; starts again from zero. Waits for the GPU."""
        devices.synchronize()
        taken = dict.fromkeys(_STAGES, 0.0)
        for kind, start, end in self._spans:
            taken[kind] += devices.milliseconds(start, end)
        self._spans.clear()
        return taken

    def _timed(self, kind: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(hidden: torch.Tensor, *args: Any) -> Any:
            entered: list[Any] = []  # when backward reached this stage's output

            def left(_grad: torch.Tensor) -> None:
                if entered:
                    self._spans.append((kind, entered.pop(), devices.mark()))

            if hidden.requires_grad:
                hidden = hidden.view_as(hidden)  # a node of our own: other users of the tensor are not timed
                hidden.register_hook(left)
            start = devices.mark()
            result = stage(hidden, *args)
            self._spans.append((kind, start, devices.mark()))
            out = result[0] if isinstance(result, tuple) else result
            if out.requires_grad and out is not hidden:
                out.register_hook(lambda _grad: entered.append(devices.mark()) if not entered else None)
            return result

        return wrapper
