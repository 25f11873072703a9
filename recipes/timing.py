"""Wall time of a step spent in dispatch and combine, forward and backward, for any Megatron dispatcher.

The six stages of every layer's dispatcher are wrapped. Backward is timed by tensor hooks: from the gradient
that enters a stage's output to the one that leaves its input. On a CPU the engine runs these nodes one after
the other, so the difference is the stage's own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

_STAGES = {
    "dispatch": ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
    "combine": ("combine_preprocess", "token_combine", "combine_postprocess"),
}


class DispatchClock:
    """Sums milliseconds of dispatch and combine until `take()`."""

    def __init__(self, moe_layers: Iterable[Any]) -> None:
        self._ms = dict.fromkeys(_STAGES, 0.0)
        for layer in moe_layers:
            for kind, names in _STAGES.items():
                for name in names:
                    stage = getattr(layer.token_dispatcher, name)
                    setattr(layer.token_dispatcher, name, self._timed(kind, stage))

    def take(self) -> dict[str, float]:
        """Milliseconds since the last call, by kind; starts again from zero."""
        taken, self._ms = self._ms, dict.fromkeys(_STAGES, 0.0)
        return taken

    def _timed(self, kind: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(hidden: torch.Tensor, *args: Any) -> Any:
            entered: list[float] = []  # when backward reached this stage's output

            def left(_grad: torch.Tensor) -> None:
                if entered:
                    self._ms[kind] += 1e3 * (time.perf_counter() - entered.pop())

            if hidden.requires_grad:
                hidden = hidden.view_as(hidden)  # a node of our own: other users of the tensor are not timed
                hidden.register_hook(left)
            start = time.perf_counter()
            result = stage(hidden, *args)
            self._ms[kind] += 1e3 * (time.perf_counter() - start)
            out = result[0] if isinstance(result, tuple) else result
            if out.requires_grad and out is not hidden:
                out.register_hook(lambda _grad: entered.append(time.perf_counter()) if not entered else None)
            return result

        return wrapper
