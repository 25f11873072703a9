"""`Buffer`: owns the native engine of one expert-parallel group on this rank.

Shapes: T tokens of this rank, H hidden, K experts per token, E experts of the group, L experts of this rank,
R rows received by this rank.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Literal, cast

from torch import Tensor

from uccl_ep_train.api.trace import DEFAULT_EVENTS, Trace
from uccl_ep_train.common.handle import DispatchHandle, DispatchResult, LayoutName, RowLayout
from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.core import autograd, cuda
from uccl_ep_train.core.calls import Call, Checks, CombineCall, DispatchCall
from uccl_ep_train.core.operations import Combined, Dispatched
from uccl_ep_train.core.pending import InFlight, PendingCombine, PendingDispatch
from uccl_ep_train.core.stats import CallClock, MemoryPlan, memory_plan
from uccl_ep_train.errors import ClosedError, CommunicationError, DtypeError
from uccl_ep_train.group import lifecycle
from uccl_ep_train.group.bootstrap import Bootstrap, TorchBootstrap
from uccl_ep_train.group.explain import explain
from uccl_ep_train.group.lifecycle import Operation, abandon, create_engine, leave, require_own
from uccl_ep_train.settings.config import EpConfig
from uccl_ep_train.settings.sections import WireDtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Buffer", "PendingCombine", "PendingDispatch"]


@opaque_methods
class Buffer:
    """Dispatches tokens to experts and combines their outputs over one group of ranks.

    Creation is collective. Operations form one sequence that has to be the same on every rank of the group; a
    rank that deviates makes all of them raise `RankMismatchError`. Concurrent sequences need two buffers.
    A call that was refused has its place, too (see `errors.py`): catch it on all ranks or on none.

    group      a torch.distributed process group (None: the default group); used for creation only
    config     see `EpConfig`
    bootstrap  replaces the group where there is no torch.distributed

    `device` is where all tensors of its calls have to lie: the GPU that was current when it was made, or the
    CPU (`EpConfig.backend`); `transport` carries rows between domains, "auto" resolved.

    Raises `ConfigError` (a value cannot work; `MemoryBudgetError` names the least budget), `TopologyError`
    (ranks disagree on domains), `RankMismatchError` (on other settings), `ArrivalTimeout` (a rank is
    missing), `PeerDied`, `PeerFailed` (another rank raised one of these), `NativeMissingError`. If creation
    fails on one rank it fails on all, and nothing stays allocated.

    Use it as a context manager, or call `close`. A buffer that is neither closed nor referenced any more
    leaves the group: at once if operations are pending, else after waiting 2 s for the other ranks to leave,
    too. A rank that goes on raises `PeerFailed`.
    """

    def __init__(
        self, group: ProcessGroup | None, config: EpConfig, *, bootstrap: Bootstrap | None = None
    ) -> None:
        if not isinstance(config, EpConfig):
            raise DtypeError(f"config is {type(config).__name__}; allowed is an EpConfig")
        meeting = bootstrap or TorchBootstrap(group, timeout_s=config.deadlines.arrival_timeout_s)
        self.config = config
        self.rank = meeting.rank
        self.num_ranks = meeting.size
        self._clock = CallClock()
        self._in_flight = InFlight()
        self._owner = object()  # Marks this buffer's handles without keeping the buffer alive.
        self._error: CommunicationError | None = None
        self._closed = False
        self._wire_fp32 = config.wire.combine_wire_dtype == "fp32"
        self._pid = os.getpid()
        self._last_stats: dict[str, float] = {}
        self.topology, self.device, self._settled, self.nics, self._engine, self._ranks = create_engine(
            meeting, config
        )
        self.transport = self._settled.network.transport
        experts = config.num_experts // self.num_ranks
        self._checks = Checks(config, self.device, self._owner, experts)
        self._launcher = cuda.launcher(self._engine, self._in_flight, self._owner, self.device, experts)
        self._finalizer = weakref.finalize(self, abandon, self._engine, self._in_flight, self._pid)
        lifecycle.watch_optimizers(self, lifecycle.GroupLife(group) if bootstrap is None else None)

    # Dispatch

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: DispatchHandle | None = None,
        expert_alignment: int = 1,
        dispatch_dtype: WireDtype | None = None,
        output_dtype: Literal["fp8"] | None = None,
        layout: LayoutName = "expert_major",
        capacity: int | None = None,
        pad_to_capacity: bool = False,
    ) -> DispatchResult:
        """Sends each token to the ranks of its experts and returns the rows that this rank's experts got.

        x                 [T, H] bfloat16 | float32, contiguous; T may differ per rank and be 0; H a multiple
                          of 128, at most `config.hidden`, equal on all ranks
        topk_idx          [T, K] int64, -1: dropped; K at most 32
        topk_weights      [T, K] float32, or None: no weights travel (on any rank)
        routing_map       [T, E] bool, instead of topk_idx; any number of experts per token
        probs             [T, E] float32, with routing_map
        handle            of an earlier dispatch of this buffer: its plan is used and no routing is exchanged.
                          Routing given with it must be the same, else every rank raises `PlanMismatchError`
        expert_alignment  rows; each expert's segment is padded to a multiple of it with zero rows
        dispatch_dtype    "fp8" | "bf16" for this call; None: the configuration's
        output_dtype      "fp8": rows stay as they travelled, codes and scales (`Fp8Rows`), and no gradient
                          flows back; with dispatch_dtype "fp8" only. None: the dtype of x
        layout            "expert_major": a row for each of a token's experts. "compact": a row per token and
                          rank, with `row_experts` and `row_weights` [R, W]; `combine` then takes the sum over
                          the row's experts. Equal on all ranks; expert_alignment has to be 1. With a handle:
                          the handle's
        capacity          0 .. 2^31 - 1 rows that the outputs hold, whatever comes; may differ per rank (on a
                          GPU all give one, or none). More are dropped, in all operations on the handle, and
                          `overflow` says so; memory of rows that did not come is not written (gradients of
                          them neither): it may hold NaN. None: as many rows as come. With a handle: its
        pad_to_capacity   rows that did not come are padding: zeros, as are their gradients in the backward of
                          `combine`; scales 1.0, row_experts -1. May differ per rank. With a handle: its

        Differentiable in x and topk_weights (probs); see `autograd.py` for what ranks must have in common.

        Raises `InputError` (`DtypeError`, `ShapeError`, `RoutingError`, `DeviceError`) before anything is
        launched; `CommunicationError`, after which the buffer is broken; `ClosedError`.
        """
        given, dtypes = (topk_idx, topk_weights, routing_map, probs), (dispatch_dtype, output_dtype)
        asked = RowLayout(layout, expert_alignment, capacity, pad_to_capacity)
        self._ready()
        with self._operation("dispatch"):
            with Call(self._launcher, "dispatch"):
                call = self._checks.dispatch(x, given, handle, asked, dtypes)
                launched = self._launcher.dispatch(call, aside=False)
            self._finish(launched)
        return self._dispatched(call, launched)

    def dispatch_async(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: DispatchHandle | None = None,
        expert_alignment: int = 1,
        dispatch_dtype: WireDtype | None = None,
        output_dtype: Literal["fp8"] | None = None,
        layout: LayoutName = "expert_major",
        capacity: int | None = None,
        pad_to_capacity: bool = False,
    ) -> PendingDispatch:
        """As `dispatch`, but returns once counts are known: with a handle at once, else when all entered.

        The result of `wait()` is differentiable, too. The arguments must not be changed before `wait()`
        returned; they are kept alive even if the pending object is dropped.
        """
        given, dtypes = (topk_idx, topk_weights, routing_map, probs), (dispatch_dtype, output_dtype)
        asked = RowLayout(layout, expert_alignment, capacity, pad_to_capacity)
        self._ready()
        with self._operation("dispatch"), Call(self._launcher, "dispatch"):
            call = self._checks.dispatch(x, given, handle, asked, dtypes)
            launched = self._launcher.dispatch(call, aside=True)

        def finish() -> DispatchResult:
            with self._operation("dispatch", starts=False):
                self._wait(launched)
            return self._dispatched(call, launched)

        pending = PendingDispatch(launched.native, launched.handle, launched.tokens_per_expert, finish)
        return self._in_flight.follow(pending)

    def _dispatched(self, call: DispatchCall, launched: Dispatched) -> DispatchResult:
        """The result of a dispatch that is over."""
        outputs, handle = launched.outputs, launched.handle
        rows, row_weights = cast(Tensor, launched.rows), outputs.row_weights
        if call.attach:
            written, gradients = (outputs.rows, row_weights), self._combine_gradients(handle)
            rows, row_weights = autograd.attach_dispatch(call.x, call.routed.values, written, gradients)
        return DispatchResult(
            rows, launched.tokens_per_expert, row_weights, handle, outputs.row_experts, launched.overflow
        )

    def _combine_gradients(self, handle: DispatchHandle) -> autograd.CombineGradients:
        """The backward of a dispatch."""

        def run(grad_rows_RH: Tensor, grad_row_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
            self._ready()
            with self._operation("dispatch_backward"):
                with Call(self._launcher, "backward of dispatch"):
                    rows, values = autograd.plain(grad_rows_RH), autograd.plain(grad_row_weights)
                    launched = self._launcher.combine(
                        rows, handle, wire_fp32=self._wire_fp32, row_values=values
                    )
                self._finish(launched)
            return launched.out, launched.values

        return run

    # Combine

    def combine(self, rows: Tensor, handle: DispatchHandle, *, grad_dtype: WireDtype | None = None) -> Tensor:
        """Sums, for each token that was dispatched from this rank, the rows that its experts made of it.

        rows        [R, H] bfloat16 | float32, contiguous, in the order of `DispatchResult.rows`; padding is
                    ignored; a compact row is the sum of what the rank's experts made of it; H may differ from
                    the dispatch's
        handle      of the dispatch
        grad_dtype  "bf16" | "fp8": how gradients travel in this call's backward; None: the configuration's

        Returns [T, H] in the dtype of rows: the unweighted sum over the token's experts (multiply rows by
        `row_weights` for a weighted one), zero for tokens without experts and without those that a capacity
        dropped. Differentiable in rows.

        Raises what `dispatch` raises.
        """
        self._ready()
        with self._operation("combine"):
            with Call(self._launcher, "combine"):
                call = self._checks.combine(rows, handle, grad_dtype)
                launched = self._launcher.combine(rows, handle, wire_fp32=self._wire_fp32)
            self._finish(launched)
        return self._combined(call, launched)

    def combine_async(
        self, rows: Tensor, handle: DispatchHandle, *, grad_dtype: WireDtype | None = None
    ) -> PendingCombine:
        """As `combine`, but returns at once. `rows` must not be changed before `wait()` returned."""
        self._ready()
        with self._operation("combine"), Call(self._launcher, "combine"):
            call = self._checks.combine(rows, handle, grad_dtype)
            launched = self._launcher.combine(rows, handle, wire_fp32=self._wire_fp32, aside=True)

        def finish() -> Tensor:
            with self._operation("combine", starts=False):
                self._wait(launched)
            return self._combined(call, launched)

        return self._in_flight.follow(PendingCombine(launched.native, finish))

    def _combined(self, call: CombineCall, launched: Combined) -> Tensor:
        """The result of a combine that is over."""
        if call.grad_wire is None:
            return launched.out
        gradients = self._dispatch_gradients(call.handle, call.grad_wire)
        return autograd.attach_combine(call.rows, launched.out, gradients)

    def _dispatch_gradients(self, handle: DispatchHandle, wire: str) -> autograd.DispatchGradients:
        """The backward of a combine."""

        def run(grad_out_TH: Tensor) -> Tensor:
            self._ready()
            with self._operation("combine_backward"):
                with Call(self._launcher, "backward of combine"):
                    call = self._checks.gradients_of_combine(autograd.plain(grad_out_TH), handle, wire)
                    launched = self._launcher.dispatch(call, aside=False)
                self._finish(launched)
            return launched.outputs.rows

        return run

    def preparing(self, what: str) -> Call:
        """`with buffer.preparing("dispatch"):` what arguments come from; what it raises refuses the call."""
        return Call(self._launcher, what)

    # State

    @property
    def closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """Raises the error of a failed operation, if any; runs before every step of a torch optimizer."""
        if self._error is not None:
            raise self._error.again()
        if self._closed:
            return
        try:
            self._engine.check()
        except CommunicationError as error:
            self._remember(error)
            raise

    def wake(self) -> None:
        """A graph that was captured with this buffer is about to be replayed, after a pause of 10 ms or more.

        Optional, and only of use with several domains: its first operation would wait some 150 us for the
        proxy's thread to wake up. Called right before `graph.replay()` that is over when the GPU begins.
        Operations that are no graph's do it themselves. Raises `ClosedError`, and as `check`.
        """
        self._ready()
        if self.device.type == "cuda":
            self._engine.wake()

    def stats(self) -> dict[str, float]:
        """Counters since creation by name (`stats.py` tells what each says); after `close` those of the end.
        `stats.format_stats` prints them.
        """
        return {**(self._last_stats if self._closed else self._engine.stats()), **self._clock.read()}

    def trace(self, path: str | os.PathLike[str], *, max_events: int = DEFAULT_EVENTS) -> Trace:
        """`with buffer.trace(path):` writes what happens inside to `<path>.rank<rank>.json`: see `trace.py`.

        Not collective. Of each thread the first `max_events` (at least; 1 .. 2^24) are kept, 56 bytes each,
        beside the budget. Raises `InputError` (nowhere to write, traced already), `ClosedError`.
        """
        self._ready()
        return Trace(self._engine, self.rank, path, max_events)

    def memory_plan(self) -> MemoryPlan:
        """What this rank has allocated, by name; the total equals the bytes allocated."""
        return memory_plan(self._settled, self.topology, self.rank)

    def close(self, *, abort: bool = False) -> None:
        """Gives everything back, whoever still refers to the buffer, a traceback or a (readable) handle.

        Idempotent. Any thread may call it, also while others are in a call. It works on a broken buffer, and
        raises no error of an operation.

        Without `abort` it waits for the operations of this rank (not for a graph's replays: synchronise
        first) and for all ranks to close, at most `progress_timeout_s`; Ctrl-C turns it into an abort. With
        `abort` nothing is waited for: pending operations raise `ClosedError` or a `CommunicationError` at
        once, those of peers `PeerFailed`. So a monitor, in another thread, unblocks ranks that wait.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            self._finalizer()
            return
        with contextlib.suppress(RuntimeError):  # of a GPU that has broken
            self._last_stats = dict(self._engine.stats())
        try:
            leave(self._engine, self._error, abort=abort)
        finally:
            # Ctrl-C, too, comes out of it only when the engine is closed.
            self._finalizer.detach()
            self._in_flight.clear(self._launcher.wait_native)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(abort=kind is not None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._error is not None else "open"
        return (
            f"Buffer(rank {self.rank}, {self.topology}, {self.config.num_experts} experts, "
            f"hidden {self.config.hidden}, {self.config.wire.dispatch_dtype} dispatch, {state})"
        )

    def _ready(self) -> None:
        require_own(self._pid)
        if self._closed:
            raise ClosedError("the buffer is closed")
        self.check()

    def _finish(self, launched: Dispatched | Combined) -> None:
        """Of an operation on the caller's stream."""
        try:
            self._launcher.finish(launched)
        finally:
            self._in_flight.prune()

    def _wait(self, launched: Dispatched | Combined) -> None:
        """Of an operation aside."""
        require_own(self._pid)
        try:
            self._launcher.wait(launched)
        finally:
            self._in_flight.prune()

    def _operation(self, kind: str, *, starts: bool = True) -> Operation:
        return Operation(kind, self._clock, self._remember, starts=starts)

    def _remember(self, error: CommunicationError, doing: str = "") -> None:
        """The first communication error breaks the buffer: every later call raises it again."""
        explain(error, self._ranks, doing)
        if self._error is None:
            self._error = error.again()
