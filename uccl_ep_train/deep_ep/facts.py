"""What a handle computes when somebody asks for it, and keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

from uccl_ep_train.core.cuda import is_capturing

T = TypeVar("T")


class Facts:
    """A handle on `device`. What was computed inside a graph has values in its replays only, and what was
    computed outside does not follow the replays of a handle that was made inside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._captured = device, is_capturing(device)
        self._known: dict[str, Any] = {}


class fact(Generic[T]):
    """A property of `Facts` that is kept where it is of use again: inside graphs for a handle that was made
    inside of one, outside for others. Elsewhere it is computed each time.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, handle: None, owner: type) -> fact[T]: ...
    @overload
    def __get__(self, handle: Facts, owner: type) -> T: ...
    def __get__(self, handle: Facts | None, owner: type) -> fact[T] | T:
        if handle is None:
            return self
        if is_capturing(handle._device) != handle._captured:
            return self._compute(handle)
        if self._name not in handle._known:
            handle._known[self._name] = self._compute(handle)
        found: T = handle._known[self._name]
        return found
