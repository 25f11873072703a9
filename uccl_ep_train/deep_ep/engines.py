"""What both interfaces stand on: engines, made when they are needed, and the stream of asynchronous calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer as Engine
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.deep_ep.checks import check_number
from uccl_ep_train.deep_ep.config import DEFAULT_BYTES, MOST_TOPK, low_latency_bytes
from uccl_ep_train.deep_ep.sending import Sender
from uccl_ep_train.deep_ep.utils.event import EventHandle, EventOverlap
from uccl_ep_train.errors import ClosedError, CommunicationError, DeviceError, DtypeError, InputError
from uccl_ep_train.group.bootstrap import TorchBootstrap
from uccl_ep_train.settings.checks import HIDDEN_UNIT
from uccl_ep_train.settings.config import EpConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MASK_TIMEOUT_S = 10.0
MOST_BYTES = 1 << 46
_BESIDE = 128  # fp32 elements that metadata has room for, beside the widest rows


@dataclass
class _Made:
    """Engines, of which those before the last serve handles that they made; and who uses them, in order."""

    senders: list[Sender] = field(default_factory=list)
    low_latency: list[LowLatency] = field(default_factory=list)
    users: list[weakref.ref[Engines]] = field(default_factory=list)
    closed: bool = False
    # Calls that were refused before it was known which engine they need: they count on the next one, too.
    refused: list[str] = field(default_factory=list)
    refused_low_latency: list[str] = field(default_factory=list)


class Engines:
    """Those of one buffer of DeepEP's shape. What DeepEP has no argument for comes from `UCCL_*` variables.

    budget_bytes        upper limit of an engine's memory; 0: 1 GiB
    combine_wire_dtype  of partial sums, "bf16" | "fp32"; None: the variable's
    outlives_ranks      low-latency calls go on without ranks that no longer answer
    in_place_of         those of an earlier buffer with the same arguments: its engines are these
    """

    def __init__(
        self,
        group: ProcessGroup,
        budget_bytes: int,
        combine_wire_dtype: str | None = None,
        outlives_ranks: bool = False,
        *,
        in_place_of: Engines | None = None,
    ) -> None:
        self._group = group
        self._outlives_ranks = outlives_ranks
        self._settings: dict[str, Any] = {"budget_bytes": budget_bytes or DEFAULT_BYTES}
        if combine_wire_dtype is not None:
            self._settings["combine_wire_dtype"] = combine_wire_dtype
        self._made: _Made = _Made() if in_place_of is None else in_place_of._made
        self._made.users = [user for user in self._made.users if user() is not None] + [weakref.ref(self)]
        self._destroyed = False
        self._comm_stream: torch.cuda.Stream | None = None

    @property
    def destroyed(self) -> bool:
        """This buffer, or the one that stands in its place."""
        return self._destroyed or self._made.closed

    def sender(self, num_experts: int, hidden: int, num_sms: int) -> Sender:
        """All ranks get here with the same numbers, so they make it together."""
        if self.destroyed:
            raise ClosedError("the buffer was destroyed")
        hidden += -hidden % HIDDEN_UNIT + _BESIDE
        for sender in reversed(self._made.senders):
            if sender.engine.config.num_experts == num_experts and sender.engine.config.hidden >= hidden:
                return sender
        made = EpConfig.from_env(
            num_experts=num_experts, hidden=hidden, dispatch_dtype="bf16", num_sms=num_sms, **self._settings
        )
        engine = Engine(self._group, made)
        self._made.senders.append(Sender(engine))
        _count_refused(engine, self._made.refused)
        return self._made.senders[-1]

    def low_latency(self, max_tokens: int, hidden: int, num_experts: int, num_sms: int) -> LowLatency:
        """As `sender`; each number of tokens has an engine of its own."""
        if self.destroyed:
            raise ClosedError("the buffer was destroyed")
        for calls in reversed(self._made.low_latency):
            config = calls.buffer.config
            room = (config.memory.low_latency_tokens, config.num_experts)
            if room == (max_tokens, num_experts) and config.hidden >= hidden:
                return calls
        made = EpConfig.from_env(
            num_experts=num_experts,
            hidden=hidden,
            budget_bytes=low_latency_bytes(max_tokens, hidden, self._group.size(), num_experts),
            low_latency_tokens=max_tokens,
            low_latency_topk=MOST_TOPK,
            num_sms=num_sms,
        )
        if made.gpu.low_latency_sms is None and self._group.size() > torch.cuda.device_count():
            made = made.replace(low_latency_sms=num_sms)  # ranks may share a GPU
        if self._outlives_ranks and made.deadlines.mask_timeout_s == 0:
            made = made.replace(mask_timeout_s=MASK_TIMEOUT_S)
        elif not self._outlives_ranks:
            made = made.replace(mask_timeout_s=0.0)
        engine = Engine(self._group, made)
        self._made.low_latency.append(LowLatency(engine))
        _count_refused(engine, self._made.refused_low_latency)
        return self._made.low_latency[-1]

    def last_low_latency(self) -> LowLatency | None:
        """That of the latest call."""
        return self._made.low_latency[-1] if self._made.low_latency else None

    def renew_low_latency(self) -> None:
        """Collective, if ranks may be masked: new engines, in which none is."""
        if not self._outlives_ranks or not self._made.low_latency:
            return
        timeout_s = self._made.low_latency[0].buffer.config.deadlines.arrival_timeout_s
        # Afterwards nobody is in an operation any more.
        TorchBootstrap(self._group, timeout_s=timeout_s).all_gather(b"", "taking masked ranks back")
        for i, calls in enumerate(self._made.low_latency):
            calls.buffer.close(abort=True)  # masked ranks do not close with the others
            self._made.low_latency[i] = LowLatency(Engine(self._group, calls.buffer.config))

    def preparing(self, *, low_latency: bool = False) -> Preparing:
        """An error in it refuses a call of which nobody knows yet which engine it needs."""
        return Preparing(self._made, low_latency)

    @staticmethod
    def device() -> torch.device:
        """Where results are."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def comm_stream(self) -> torch.cuda.Stream:
        """The stream of asynchronous calls. On GPUs only."""
        if not torch.cuda.is_available():
            raise DeviceError("there is no GPU; a stream is allowed where torch sees one")
        if self._comm_stream is None:
            self._comm_stream = torch.cuda.Stream()
        return self._comm_stream

    def run(
        self,
        run: Callable[[], Any],
        given: Any,
        previous_event: EventOverlap | EventHandle | None,
        aside: bool,
    ) -> tuple[Any, EventOverlap]:
        """Runs on the current stream, or aside: on the other one, which nobody waits for yet.

        given  the tensors that it reads
        """
        with torch.no_grad():
            if not aside or not torch.cuda.is_available():
                if previous_event is not None:
                    previous_event.current_stream_wait()
                return run(), EventOverlap(EventHandle() if aside else None)
            here, comm = torch.cuda.current_stream(), self.comm_stream()
            after = previous_event.event if isinstance(previous_event, EventOverlap) else previous_event
            with torch.cuda.stream(comm):
                (EventHandle(here) if after is None else after).current_stream_wait()
                results = run()
                event = EventHandle()
            for tensor in _tensors_of(given):
                tensor.record_stream(comm)
            for tensor in _tensors_of(results):
                tensor.record_stream(here)
            return results, EventOverlap(event)

    def destroy(self) -> None:
        """Collective: leaves the group. What stands in place of this one keeps its engines."""
        self._destroyed = True
        users = [user for reference in self._made.users if (user := reference()) is not None]
        if users[-1] is not self:
            return
        self._made.closed = True
        while self._made.senders:
            self._made.senders.pop().engine.close()
        while self._made.low_latency:
            self._made.low_latency.pop().buffer.close()


def check_group(group: Any, **sizes: Any) -> None:
    """And the bytes of its buffer, by name. Raises `DtypeError`, `InputError`."""
    if not (hasattr(group, "rank") and hasattr(group, "size")):
        raise DtypeError(f"group is {type(group).__name__}; allowed is one of torch.distributed")
    for name, value in sizes.items():
        check_number(name, value, 0, MOST_BYTES)


def check_event(event: Any) -> None:
    """None, or what a stream can wait for. Raises `DtypeError`."""
    if event is not None and not hasattr(event, "current_stream_wait"):
        raise DtypeError(f"previous_event is {type(event).__name__}; allowed are None and an event")


class Preparing:
    """What comes before a call knows its engine. An error in it counts as a call of every engine, and of the
    next one that is made: rows of different calls never meet.
    """

    __slots__ = ("_low_latency", "_made")

    def __init__(self, made: _Made, low_latency: bool) -> None:
        self._made, self._low_latency = made, low_latency

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (ClosedError, CommunicationError)):
            return
        if self._low_latency:
            engines = [calls.buffer for calls in self._made.low_latency]
            self._made.refused_low_latency.append(str(error))
        else:
            engines = [sender.engine for sender in self._made.senders]
            self._made.refused.append(str(error))
        for engine in engines:
            _count(engine, error)


def _count(engine: Engine, error: BaseException) -> None:
    """As a call of an engine, which was refused."""
    call = engine.preparing("call")
    call.__enter__()
    call.__exit__(type(error), error, None)


def _count_refused(engine: Engine, refused: list[str]) -> None:
    """As calls of a new engine."""
    for text in refused:
        _count(engine, InputError(text))
    refused.clear()


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_cuda else []
    value = getattr(value, "kept", value)  # of a handle
    return [tensor for part in value for tensor in _tensors_of(part)] if isinstance(value, tuple) else []
