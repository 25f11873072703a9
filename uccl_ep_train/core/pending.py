"""Operations that were launched and not yet waited for.

The worker threads of the engine read and write tensors by address. Two things keep those tensors alive: the
`Pending*` object of the caller, and, in case the caller drops it, the record that the buffer holds until the
engine is done.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from uccl_ep_train.common.handle import DispatchHandle, DispatchResult, NativeOp
from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.common.uncopied import Uncopied
from uccl_ep_train.errors import EpError

Result = TypeVar("Result")
AnyPending = TypeVar("AnyPending", bound="_Pending[Any]")


class Record:
    """The tensors of one operation."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self._tensors: list[Tensor] = []

    def keep(self, *tensors: Tensor | None) -> None:
        # Detached: the memory is wanted, not the graph.
        self._tensors += [tensor.detach() for tensor in tensors if tensor is not None]

    def let_go(self) -> None:
        """Tracebacks may lead to this record, and live long."""
        self._tensors = []


class InFlight:
    """Tensors of operations that the engine may still touch. Refers to no buffer and may outlive one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._pending: weakref.WeakSet[_Pending[Any]] = weakref.WeakSet()

    def follow(self, pending: AnyPending) -> AnyPending:
        """A caller gets it, and may keep it for longer than the engine lives."""
        with self._lock:
            self._pending.add(pending)
        return pending

    def add(self, native: Any, *tensors: Tensor | None) -> Record:
        record = Record(native)
        record.keep(*tensors)
        with self._lock:
            self._records.append(record)
        self.prune()
        return record

    def prune(self) -> None:
        """Lets go of the tensors of operations that are over; called when one was launched or waited for."""
        if not self._records:
            return
        with self._lock:
            self._records = [entry for entry in self._records if not entry.native.done]

    def clear(self, wait: Callable[[Any], None] | None = None) -> None:
        """Only after the engine has been closed. `wait` raises what a native operation failed with."""
        with self._lock:
            records, self._records = self._records, []
            pending, self._pending = list(self._pending), weakref.WeakSet()
        for record in records:
            record.let_go()
        if wait is not None:
            for operation in pending:
                operation.let_go(wait)

    def __len__(self) -> int:
        with self._lock:
            return len(self._records)


@opaque_methods
class _Pending(Uncopied, Generic[Result]):
    """One launched operation. `finish` waits for the engine and returns the result."""

    instead = "its wait(), on any thread, which gives all callers the same result"

    def __init__(self, native: NativeOp, finish: Callable[[], Result]) -> None:
        self._native = native
        self._finish: Callable[[], Result] | None = finish
        self._lock = threading.RLock()
        self._result: Result | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._finish is None or bool(self._native.done)

    def wait(self) -> Result:
        """The result, attached to the autograd graph; waits for it. A second call, on any thread, gives (or
        raises) the same.

        Raises the `CommunicationError` of a failed operation; its outputs then hold NaN.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._finish is not None:
                try:
                    self._result = self._finish()
                except Exception as error:
                    # Not BaseException: an interrupted wait can be taken up again.
                    self._error = error
                    self._finish = None
                    raise
                self._finish = None
            return self._result  # type: ignore[return-value]

    def let_go(self, wait: Callable[[NativeOp], None]) -> None:
        """The engine has been closed: an operation that failed keeps its error and none of its tensors."""
        # Who waits on another thread lets go as soon as it sees the end.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._finish is not None:
                wait(self._native)
        except EpError as error:
            self._error, self._finish = error.again(), None
        finally:
            self._lock.release()


@opaque_methods
class PendingDispatch(_Pending[DispatchResult]):
    """A dispatch whose counts are known and whose rows are on their way.

    handle             the plan; usable at once
    num_rows           R
    tokens_per_expert  as in `DispatchResult`; on a GPU with a capacity usable after `wait()` only
    """

    def __init__(
        self,
        native: NativeOp,
        handle: DispatchHandle,
        tokens_per_expert: Tensor,
        finish: Callable[[], DispatchResult],
    ) -> None:
        super().__init__(native, finish)
        self.handle = handle
        self.tokens_per_expert = tokens_per_expert

    @property
    def num_rows(self) -> int:
        return self.handle.num_rows


@opaque_methods
class PendingCombine(_Pending[Tensor]):
    """A combine on its way; `wait` returns the output [T, H]."""
