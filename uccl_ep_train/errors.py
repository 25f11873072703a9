"""The exceptions of `uccl_ep_train`. Every one derives from `EpError`.

Two families, because they leave different things usable:

* `InputError`, `ConfigError`: raised on the host before anything is launched. A refused call of a buffer
  counts as a call, whatever refused it (also out-of-memory and Ctrl-C), because calls pair up by their order.
  Catch it on all ranks or on none. A rank that continues alone, or repeats the call, is one call ahead. Then
  all ranks raise `RankMismatchError`, which names the refused call and the reason.
* `CommunicationError`: an operation that involves other ranks failed. Outputs are filled with NaN, the buffer
  is broken (every later call raises the same error) and must be closed; a new buffer may be created.

The native core raises these classes by name; this file must therefore not import it.
"""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    "ArrivalTimeout",
    "ClosedError",
    "CommunicationError",
    "ConfigError",
    "DeviceError",
    "DtypeError",
    "EpError",
    "InputError",
    "MemoryBudgetError",
    "NativeMissingError",
    "PeerDied",
    "PeerFailed",
    "PlanMismatchError",
    "ProgressTimeout",
    "RankMismatchError",
    "RoutingError",
    "ShapeError",
    "TopologyError",
    "TransportError",
]


class EpError(RuntimeError):
    """Base of everything this package raises on purpose."""

    def again(self) -> EpError:
        """A new instance with the same contents.

        A broken buffer raises its error on every call; raising one instance again and again would grow its
        traceback and keep the frames (and tensors) of the first raise alive.
        """
        return type(self)(*self.args)


class ConfigError(EpError, ValueError):
    """A configuration value is invalid. The message names the value and what is allowed."""


class MemoryBudgetError(ConfigError):
    """`budget_bytes` is below the least budget, which the message names (bytes)."""


class InputError(EpError, ValueError):
    """An argument of a call is invalid. Nothing was launched; the buffer stays usable (see above)."""


class DtypeError(InputError, TypeError):
    """An argument has the wrong dtype or type."""


class ShapeError(InputError):
    """An argument has the wrong shape or strides."""


class RoutingError(InputError):
    """Routing values are invalid: an expert out of range, or an expert twice in one token."""


class DeviceError(InputError):
    """A tensor lies on a device for which this build has no backend."""


class ClosedError(EpError):
    """The buffer was closed."""


class NativeMissingError(EpError):
    """The compiled extension `uccl_ep_train._native` cannot be imported."""


class TopologyError(EpError):
    """Ranks disagree on which of them form a domain, or configured domains cannot share memory."""


class ErrorFields(TypedDict):
    """As `CommunicationError` has them."""

    rank: int
    epoch: int
    step: str
    chunk: int
    peer: int
    expected: object
    seen: object


class CommunicationError(EpError):
    """An operation that involves other ranks failed; the first cause, as seen by the rank that noticed it.

    rank      group rank that noticed the failure (-1: unknown, as below)
    epoch     number of the operation on its buffer, not counting calls that were refused
    step      exchange | plan | stage | ship | place | fold | merge, or the step of creation
    chunk     index of the chunk inside the operation
    peer      group rank that was waited for
    expected, seen   the value the waiter needed and the one it found
    kind      short name of the class, for logs and metrics
    """

    kind = "communication"

    def __init__(
        self,
        message: str = "",
        *,
        rank: int = -1,
        epoch: int = -1,
        step: str = "",
        chunk: int = -1,
        peer: int = -1,
        expected: object = None,
        seen: object = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.epoch = epoch
        self.step = step
        self.chunk = chunk
        self.peer = peer
        self.expected = expected
        self.seen = seen

    def fields(self) -> ErrorFields:
        """The keyword arguments that rebuild this error."""
        return {
            "rank": self.rank,
            "epoch": self.epoch,
            "step": self.step,
            "chunk": self.chunk,
            "peer": self.peer,
            "expected": self.expected,
            "seen": self.seen,
        }

    def rewrite(self, message: str) -> None:
        """Replaces its text, for callers that know more than the finder."""
        self.args = (message,)

    def again(self) -> CommunicationError:
        return type(self)(*self.args, **self.fields())

    def __reduce__(self) -> tuple[object, ...]:
        # Launchers send exceptions between processes; the default would lose the keyword-only fields.
        return _rebuild, (type(self), self.args, self.fields())


class ArrivalTimeout(CommunicationError):
    """A peer did not enter the operation within `arrival_timeout_s`."""

    kind = "arrival_timeout"


class ProgressTimeout(CommunicationError):
    """A peer entered the operation, then no byte and no flag moved for `progress_timeout_s`."""

    kind = "progress_timeout"


class PeerDied(CommunicationError):
    """The process of a peer is gone."""

    kind = "peer_died"


class PeerFailed(CommunicationError):
    """Another rank reported a failure of its own, or closed its buffer early."""

    kind = "peer_failed"


class TransportError(CommunicationError):
    """The transport between domains reported an error."""

    kind = "transport"


class RankMismatchError(CommunicationError):
    """Two ranks made different calls (operation, dtype, hidden size, setting), or one refused a call that the
    other made. Names both ranks, both calls and the reason of the refusal.
    """

    kind = "rank_mismatch"


class PlanMismatchError(CommunicationError):
    """A cached plan was used with another routing, on this or another rank; every rank raises it."""

    kind = "plan_mismatch"


def _rebuild(cls: type[CommunicationError], args: tuple[str, ...], fields: ErrorFields) -> CommunicationError:
    return cls(*args, **fields)


_MOST_TOLD = 150
"""Characters of an exception that travel to the other ranks, in a record of fixed size."""


def told(error: BaseException) -> str:
    """An exception's type and text in one line, for the ranks that must stop because of it."""
    line = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return line if len(line) <= _MOST_TOLD else line[: _MOST_TOLD - 3] + "..."
