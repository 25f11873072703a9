"""Events: what a caller's stream waits for."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


class EventHandle:
    """What was queued on a stream (the current one) when this was made; on a CPU nobody has to wait."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(stream)

    def current_stream_wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event that the caller waits for when it needs the results; also as `with event:` around other work.

    event          None: nothing is waited for
    extra_tensors  kept alive as long as this
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], None] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream waits; then the hook runs. release_handle: the event is forgotten."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        assert self.hook_after_wait is None, "there is a hook already"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.current_stream_wait(self._releases)
        self._releases = False
