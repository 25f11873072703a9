"""Creation of a buffer's engine, its end without `close`, and the check before every optimizer step."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from uccl_ep_train.common.opaque import opaque
from uccl_ep_train.core import cuda
from uccl_ep_train.core.native import check_fit, load_native, native_config
from uccl_ep_train.core.pending import InFlight
from uccl_ep_train.core.stats import CallClock
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import ClosedError, CommunicationError, told
from uccl_ep_train.group import leftovers, transport, windows
from uccl_ep_train.group.answers import require
from uccl_ep_train.group.bootstrap import Bootstrap, exchange, give_up
from uccl_ep_train.group.domains import Handshake, agree_on_config, are_set, found
from uccl_ep_train.group.patience import PatientTimer
from uccl_ep_train.group.presence import Presences, meet
from uccl_ep_train.settings.config import EpConfig


class Operation:
    """Times a caller's operation and passes a communication error to `remember`. It runs in every call; a
    class takes a third of the time of a generator.
    """

    __slots__ = ("_clock", "_kind", "_remember", "_started", "_starts")

    def __init__(
        self,
        kind: str,
        clock: CallClock,
        remember: Callable[[CommunicationError, str], None],
        *,
        starts: bool,
    ) -> None:
        """starts: the operation begins here; False: the time adds to one that has begun"""
        self._kind = kind
        self._clock = clock
        self._remember = remember
        self._starts = starts

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, CommunicationError):
            self._remember(error, self._kind)
        self._clock.add(self._kind, time.perf_counter() - self._started, starts=self._starts)


def new_engine(native: Any, config: EpConfig, device: torch.device) -> Any:
    """The engine of one rank, not connected yet."""
    if device.type == "cuda":
        return load_native().GpuEngine(native, device.index, config.gpu.num_sms, config.gpu.stage_sms or 0)
    return load_native().HostEngine(native)


class Created(NamedTuple):
    """config: with "auto" resolved. nics: this rank's, as the transport names them; "" for loop.
    ranks: where each runs.
    """

    topology: Topology
    device: torch.device
    config: EpConfig
    nics: str
    engine: Any
    ranks: Presences


class Settled(NamedTuple):
    """What ranks agree on before any allocation.

    generation  the key of the engine, as `topology.Agreement` has it
    config      with "auto" resolved
    nics        this rank's, as the transport names them; "" for loop
    why         the transport was chosen
    ranks       where each runs
    """

    generation: int
    topology: Topology
    device: torch.device
    config: EpConfig
    nics: str
    why: str
    ranks: Presences


def settle_config(bootstrap: Bootstrap, config: EpConfig) -> Settled:
    """Collective; allocates nothing. Raises what the creation of a `Buffer` raises."""
    device, topology = torch.device("cpu"), None

    def introduce() -> bytes:
        nonlocal device
        device = cuda.choose_device(config)
        return b"" if are_set(config) else handshake.offer()

    def verify() -> list[Any]:
        nonlocal topology
        check_fit(config, bootstrap.size)
        topology = Topology.from_config(config, bootstrap.size)
        load_native()
        return [transport.probe(config, places), handshake.reach(bootstrap.rank, offers).decode()]

    # A segment of the handshake goes when all have looked: a rank leaves an exchange only when all have
    # entered.
    with Handshake() as handshake:
        ranks, offers = meet(bootstrap, introduce)
        places = ranks.places
        # The resolved "auto" must also be equal on all ranks.
        config = config.replace(backend="cuda" if device.type == "cuda" else "host")
        generation, said = agree_on_config(bootstrap, config, verify, _reports)
    probes = [probe for probe, _ in said]
    if topology is None:
        topology = found(bootstrap.rank, [reached.encode() for _, reached in said])
    topology = topology.on_hosts([place.memory for place in places])
    transport.check_domains(config, topology, places)
    choice = transport.choose(
        config.network.transport,
        places,
        probes,
        num_domains=topology.num_domains,
        on_gpu=device.type == "cuda",
    )
    if config.network.transport == "auto" and topology.num_domains > 1 and bootstrap.rank == 0:
        transport.announce(choice)
    nics = str(probes[bootstrap.rank].get(choice.name, ["", ""])[1])
    settled = windows.settle(choice.apply(config), nics, topology)
    return Settled(generation, topology, device, settled, nics, choice.why, ranks)


def _reports(value: Any) -> tuple[dict[str, Any], str]:
    """What a rank says of its transports, and of the memory that it reaches."""
    require(isinstance(value, list) and len(value) == 2 and isinstance(value[1], str), "no reports")
    return transport.probes(value[0]), value[1]


def create_engine(bootstrap: Bootstrap, config: EpConfig) -> Created:
    """Collective. Every fallible step is an exchange: a failure on one rank fails all ranks at once. Only
    `transport.choose` needs no exchange, because it has the same result on all ranks.
    """

    created: list[Any] = []
    handles: list[bytes] = []

    def allocate() -> bytes:
        created.append(
            new_engine(native_config(settled, topology, bootstrap.rank, generation), settled, device)
        )
        return bytes(created[0].export_handle())

    def connect() -> bytes:
        created[0].connect(handles)
        return b""

    def share_memory() -> bytes:
        created[0].share_memory()
        return b""

    def start() -> bytes:
        created[0].start()
        return b""

    try:
        drop_outlived()
        leftovers.sweep()
        generation, topology, device, settled, nics, _, ranks = settle_config(bootstrap, config)
        handles += exchange(bootstrap, "allocate", allocate)
        exchange(bootstrap, "connect", connect)
        if device.type == "cuda":  # it waits for peers, so it begins when all have connected
            exchange(bootstrap, "share memory", share_memory)
        # `start` removes the names of the shared memory, which all ranks have mapped by now.
        exchange(bootstrap, "start", start)
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C between two exchanges, which nobody else knows of
            give_up(bootstrap, error)
        # Popped, because the traceback keeps `created` alive; an engine frees its memory when it is
        # collected.
        while created:
            created.pop().close(abort=True)
        leftovers.sweep()  # of a rank that died
        raise
    finally:
        finish = getattr(bootstrap, "finish", None)
        if finish is not None:
            finish()
    return Created(topology, device, settled, nics, created[0], ranks)


def require_own(process_id: int) -> None:
    """Raises `ClosedError` in a process forked from the one that created the buffer."""
    if os.getpid() != process_id:
        raise ClosedError(
            f"the buffer belongs to process {process_id}, from which process {os.getpid()} was forked; its "
            "threads do not exist here. Make one in the process that uses it"
        )


def leave(engine: Any, error: CommunicationError | None, *, abort: bool) -> None:
    """Closes the engine of a buffer with that error. An abort by an exception tells peers which exception."""
    cause = sys.exc_info()[1]
    if abort and error is None and cause is not None:
        engine.fail(f"left its buffer because of {told(cause)}")
    engine.close(abort=abort or error is not None)


LEAVE_GRACE_S = 2.0
"""How long an idle rank that goes without `close` waits for ranks that are not done yet."""


def abandon(engine: Any, in_flight: InFlight, process_id: int) -> None:
    """Runs when an unclosed buffer is collected or the interpreter exits: waits briefly."""
    if os.getpid() != process_id:
        engine.never_end()
        return
    in_flight.prune()
    # An exception ended the program: tell peers at once.
    last = getattr(sys, "last_value", None)
    if last is not None:
        engine.fail(f"its program was ended by {told(last)}")
    if len(in_flight) > 0 or last is not None:
        engine.close(abort=True)
    else:
        _leave(engine)
    in_flight.clear()


def _leave(engine: Any) -> None:
    """Closes together with the other ranks if they close, too, as at the end of a program; else alone."""
    impatience = PatientTimer(LEAVE_GRACE_S, engine.fail, ["left without closing its buffer"])
    impatience.daemon = True
    try:
        impatience.start()
    except RuntimeError:  # No thread can start this late in the interpreter's shutdown.
        engine.close(abort=True)
        return
    engine.close()
    impatience.cancel()


class GroupLife:
    """Tells whether a torch.distributed group has been destroyed. Does not keep it alive."""

    def __init__(self, group: Any) -> None:
        """group: None is the default group. A group unknown to torch counts as alive."""
        if group is None and torch.distributed.is_initialized():
            group = torch.distributed.group.WORLD
        self._group = weakref.ref(group) if _is_registered(group) else None
        self.forgotten: Callable[[], bool] = bool  # says no

    @property
    def over(self) -> bool:
        if self._group is None:
            return False
        group = self._group()  # torch holds the groups that it knows
        return group is None or not _is_registered(group) or self.forgotten()


def _is_registered(group: Any) -> bool:
    if group is None or not torch.distributed.is_available():
        return False
    try:
        torch.distributed.get_process_group_ranks(group)
    except (KeyError, ValueError, TypeError):
        return False
    return True


class Checked(Protocol):
    """An object that may have a pending error."""

    @property
    def closed(self) -> bool: ...

    def check(self) -> None: ...

    def close(self, *, abort: bool = False) -> None: ...


_live: weakref.WeakKeyDictionary[Any, GroupLife | None] = weakref.WeakKeyDictionary()
_hook_lock = threading.Lock()
_hooked = False


def _forget_live() -> None:
    """In a forked process: the buffers are the parent's, and a thread that is not here may hold the lock."""
    global _live, _hook_lock
    _live, _hook_lock = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_live)


def watch_optimizers(buffer: Checked, life: GroupLife | None) -> None:
    """From now until it is closed, `buffer.check()` runs before every step of every torch optimizer.

    life: of its torch.distributed group; None: it has none

    A failed operation leaves NaN, possibly only in gradients, so the optimizer must not step.
    """
    global _hooked
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    with _hook_lock:
        _live[buffer] = life
        if not _hooked:
            register_optimizer_step_pre_hook(check_live_buffers)
            _hooked = True


def group_is_over(buffer: Checked) -> bool:
    """Whether the torch.distributed group of a buffer has been destroyed."""
    life = _live.get(buffer)
    return life is not None and life.over


def also_over_if(buffer: Checked, forgotten: Callable[[], bool]) -> None:
    """From now on the group of a buffer counts as destroyed, too, while `forgotten()`."""
    life = _live.get(buffer)
    if life is not None:
        life.forgotten = forgotten


@opaque
def check_live_buffers(*_: Any) -> None:
    """Raises the error of a failed operation of any buffer that is not closed.

    A broken buffer whose process group has been destroyed cannot be used again. After
    torch.distributed restarts in the process, that buffer is closed with a warning, because its error does
    not concern the new ranks.
    """
    with _hook_lock:
        buffers = list(_live)
    for buffer in buffers:
        if buffer.closed:
            continue
        try:
            buffer.check()
        except CommunicationError as error:
            if not (group_is_over(buffer) and torch.distributed.is_initialized()):
                raise
            warnings.warn(
                f"a buffer is dropped whose process group has been destroyed; its error was: {error}",
                stacklevel=2,
            )
            buffer.close(abort=True)


def drop_outlived() -> None:
    """Closes broken buffers whose process groups have been destroyed: a new one needs their memory."""
    with _hook_lock:
        buffers = list(_live)
    for buffer in buffers:
        if not buffer.closed and group_is_over(buffer) and _is_broken(buffer):
            buffer.close(abort=True)


def _is_broken(buffer: Checked) -> bool:
    try:
        buffer.check()
    except CommunicationError:
        return True
    return False
