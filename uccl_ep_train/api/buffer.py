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
from uccl_ep_train.common.handle import DispatchHandle, DispatchResult, Fp8Rows, LayoutName, RowLayout
from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.common.uncopied import Uncopied
from uccl_ep_train.core import autograd, cuda
from uccl_ep_train.core.calls import Bias, Call, Checks, CombineCall, DispatchCall
from uccl_ep_train.core.operations import Combined, Dispatched
from uccl_ep_train.core.pending import InFlight, PendingCombine, PendingDispatch
from uccl_ep_train.core.stats import CallClock, MemoryPlan, memory_plan
from uccl_ep_train.errors import ClosedError, CommunicationError, DtypeError
from uccl_ep_train.group import lifecycle
from uccl_ep_train.group.bootstrap import Bootstrap, TorchBootstrap
from uccl_ep_train.group.explain import explain
from uccl_ep_train.group.lifecycle import Operation, abandon, create_engine, leave, require_own
from uccl_ep_train.settings.config import EpConfig
from uccl_ep_train.settings.sections import CallWireDtype, WireDtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Buffer", "PendingCombine", "PendingDispatch"]


@opaque_methods
class Buffer(Uncopied):
    """Dispatches tokens to experts and combines their outputs over one group of ranks.

    Creation is collective. Operations form one sequence, which must be the same on every rank of the group.
    If one rank deviates, all raise `RankMismatchError`. Concurrent sequences need two buffers. A refused call
    counts as part of the sequence (see `errors.py`): catch its error on all ranks or on none.

    group      a torch.distributed process group (None: the default group); used for creation only
    config     see `EpConfig`
    bootstrap  replaces the group if torch.distributed is not used

    All tensors must lie on `device`: the GPU that was current at creation, or the CPU (`EpConfig.backend`).
    `transport` names the transport between domains, with "auto" resolved.

    Raises `ConfigError` (an invalid value; `MemoryBudgetError` names the least budget), `TopologyError`
    (ranks disagree on domains), `RankMismatchError` (on other settings), `ArrivalTimeout` (a rank is
    missing), `PeerDied`, `PeerFailed` (another rank raised one of these), `NativeMissingError`. If creation
    fails on one rank it fails on all, and nothing stays allocated.

    Use it as a context manager, or call `close`. A buffer that is collected without `close` leaves
    the group: at once if operations are pending, else after waiting up to 2 s for the other ranks to leave.
    Ranks that continue raise `PeerFailed`.
    """

    def __init__(
        self, group: ProcessGroup | None, config: EpConfig, *, bootstrap: Bootstrap | None = None
    ) -> None:
        if not isinstance(config, EpConfig):
            raise DtypeError(f"config is {type(config).__name__}; allowed is an EpConfig")
        self.config = config
        self._clock = CallClock()
        self._in_flight = InFlight()
        self._owner = object()  # Marks this buffer's handles without keeping the buffer alive.
        self._error: CommunicationError | None = None
        self._closed = False
        self._pid = os.getpid()
        self._last_stats: dict[str, float] = {}
        meeting = bootstrap or TorchBootstrap(group, timeout_s=config.deadlines.arrival_timeout_s)
        self.rank = meeting.rank
        self.num_ranks = meeting.size
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
        x: Tensor | Fp8Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: DispatchHandle | None = None,
        expert_alignment: int = 1,
        dispatch_dtype: CallWireDtype | None = None,
        output_dtype: Literal["fp8"] | None = None,
        layout: LayoutName = "expert_major",
        capacity: int | None = None,
        pad_to_capacity: bool = False,
        max_tokens: int | None = None,
        metadata: Tensor | None = None,
    ) -> DispatchResult:
        """Sends each token to the ranks of its experts and returns the rows that this rank's experts got.

        x                 [T, H] bfloat16 | float32, contiguous; T may differ per rank and be 0; H a multiple
                          of 32, at most `config.hidden`, equal on all ranks. Or, on all ranks, `Fp8Rows`:
                          they come out as they are, and have no gradient. Exponents may have any strides
        topk_idx          [T, K] int64, -1: dropped; K at most 32
        topk_weights      [T, K] float32, or None on all ranks: no weights are sent
        routing_map       [T, E] bool, instead of topk_idx; any number of experts per token
        probs             [T, E] float32, with routing_map
        handle            of an earlier dispatch of this buffer: its plan is used and no routing is exchanged.
                          Routing passed with it must be equal, else every rank raises `PlanMismatchError`
        expert_alignment  rows; each expert's segment is padded to a multiple of it with zero rows
        dispatch_dtype    "fp8" | "bf16"; "fp8_pow2" | "fp8_fp32" name the scales; None: the configuration's
        output_dtype      "fp8": rows stay as on the wire, codes and scales (`Fp8Rows`), and have no gradient;
                          only with dispatch_dtype "fp8". None: the dtype of x
        layout            "expert_major": a row for each of a token's experts. "compact": a row per token and
                          rank, with `row_experts` and `row_weights` [R, W]; `combine` then expects the sum
                          over the row's experts. Equal on all ranks; expert_alignment must be 1. With a
                          handle: the handle's
        capacity          0 .. 2^31 - 1: the fixed number of output rows; may differ per rank (on a GPU all
                          ranks pass one, or none does). Further rows are dropped in all operations on the
                          handle, and `overflow` is true. Unused rows and their gradients are not written and
                          may hold NaN. None: as many rows as are received. With a handle: the handle's
        pad_to_capacity   unused rows become padding: zeros, as do their gradients in `combine`'s backward;
                          scales 1.0, row_experts -1. May differ per rank. With a handle: the handle's
        max_tokens        1 .. 2^30, with a capacity: at least the T of any rank, equal on all; sizes a GPU's
                          plan. None: tokens of several windows are as many. With a handle: the handle's
        metadata          [T, M] int32, M from 1 to 4096, or None; M equal on all ranks. It travels with each
                          token's row; both take at most the bytes of `config.hidden` elements of max_dtype

        Differentiable once, in x and topk_weights (probs); `autograd.py` says what is equal on all ranks.

        Raises `InputError` (`DtypeError`, `ShapeError`, `RoutingError`, `DeviceError`) before anything is
        launched; `CommunicationError`, after which the buffer is broken; `ClosedError`.
        """
        given, dtypes = (topk_idx, topk_weights, routing_map, probs), (dispatch_dtype, output_dtype)
        asked = RowLayout(layout, expert_alignment, capacity, pad_to_capacity, max_tokens)
        self._ready()
        with self._operation("dispatch"):
            with Call(self._launcher, "dispatch"):
                call = self._checks.dispatch(x, given, handle, asked, dtypes, metadata)
                launched = self._launcher.dispatch(call, aside=False)
            self._finish(launched)
        return self._dispatched(call, launched)

    def dispatch_async(
        self,
        x: Tensor | Fp8Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: DispatchHandle | None = None,
        expert_alignment: int = 1,
        dispatch_dtype: CallWireDtype | None = None,
        output_dtype: Literal["fp8"] | None = None,
        layout: LayoutName = "expert_major",
        capacity: int | None = None,
        pad_to_capacity: bool = False,
        max_tokens: int | None = None,
        metadata: Tensor | None = None,
    ) -> PendingDispatch:
        """As `dispatch`, but returns once counts are known: with a handle at once, else when all ranks
        entered. Until `wait()` has returned, do not change the arguments; they are kept alive.
        """
        given, dtypes = (topk_idx, topk_weights, routing_map, probs), (dispatch_dtype, output_dtype)
        asked = RowLayout(layout, expert_alignment, capacity, pad_to_capacity, max_tokens)
        self._ready()
        with self._operation("dispatch"), Call(self._launcher, "dispatch"):
            call = self._checks.dispatch(x, given, handle, asked, dtypes, metadata).placed()
            launched = self._launcher.dispatch(call, aside=True)

        def finish() -> DispatchResult:
            with self._operation("dispatch", starts=False):
                self._finish(launched, aside=True)
            return self._dispatched(call, launched)

        pending = PendingDispatch(launched.native, launched.handle, launched.tokens_per_expert, finish)
        return self._in_flight.follow(pending)

    def _dispatched(self, call: DispatchCall, launched: Dispatched) -> DispatchResult:
        """The result of a finished dispatch."""
        outputs, handle = launched.outputs, launched.handle
        rows, row_weights = cast(Tensor, launched.rows_of(call)), outputs.row_weights
        if call.attach:
            made, run = (outputs.rows, row_weights), self.combine_gradients(handle)
            rows, row_weights = autograd.attach_dispatch(call.x, call.routed.values, made, run, call.place)
        counts, overflow = launched.tokens_per_expert, launched.overflow
        experts, metadata = outputs.row_experts, outputs.metadata
        return DispatchResult(rows, counts, row_weights, handle, experts, overflow, metadata)

    def combine_gradients(self, handle: DispatchHandle, bias: Bias = ()) -> autograd.CombineGradients:
        """The backward of a dispatch, which may be called any number of times. `bias`: as of `combine`."""

        def run(grad_rows: Tensor, grad_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
            self._ready()
            with self._operation("dispatch_backward"):
                with Call(self._launcher, "backward of dispatch"):
                    call, values = self._checks.gradients_of_dispatch(grad_rows, grad_weights, handle, bias)
                    launched = self._launcher.combine(call, row_values=values)
                self._finish(launched)
            return launched.out, launched.values

        return run

    # Combine

    def combine(
        self,
        rows: Tensor,
        handle: DispatchHandle,
        *,
        bias: Bias = (),
        grad_dtype: WireDtype | None = None,
        rounds_sums: bool = False,
    ) -> Tensor:
        """Sums, for each token of this rank, the rows that its experts computed.

        rows        [R, H] bfloat16 | float32, contiguous, in the order of `DispatchResult.rows`; padding is
                    ignored; a compact row is the sum over the rank's experts; H may differ from the
                    dispatch's
        handle      of the dispatch
        bias        [T, H] in the dtype of rows, or up to two: the first addends of each sum
        grad_dtype  "bf16" | "fp8": the wire format of gradients in this call's backward; None: the
                    configuration's
        rounds_sums  float32 rows, on CPUs: the sum that another domain returns is rounded to bfloat16

        Returns [T, H] in the dtype of rows: the unweighted sum over the token's experts (multiply rows by
        `row_weights` for a weighted one), without rows that a capacity dropped, rounded once; zero, or the
        bias, for tokens without experts. Differentiable once, in rows and bias.

        Raises what `dispatch` raises.
        """
        self._ready()
        with self._operation("combine"):
            with Call(self._launcher, "combine"):
                call = self._checks.combine(rows, handle, bias, grad_dtype, rounds_sums)
                launched = self._launcher.combine(call)
            self._finish(launched)
        return self._combined(call, launched)

    def combine_async(
        self, rows: Tensor, handle: DispatchHandle, *, bias: Bias = (), grad_dtype: WireDtype | None = None
    ) -> PendingCombine:
        """As `combine`, but returns at once. Do not change rows and bias before `wait()` has returned."""
        self._ready()
        with self._operation("combine"), Call(self._launcher, "combine"):
            call = self._checks.combine(rows, handle, bias, grad_dtype).placed()
            launched = self._launcher.combine(call, aside=True)

        def finish() -> Tensor:
            with self._operation("combine", starts=False):
                self._finish(launched, aside=True)
            return self._combined(call, launched)

        return self._in_flight.follow(PendingCombine(launched.native, finish))

    def _combined(self, call: CombineCall, launched: Combined) -> Tensor:
        """The result of a finished combine."""
        if call.grad_wire is None:
            return launched.out
        gradients = self._dispatch_gradients(call.handle, call.grad_wire)
        return autograd.attach_combine(call.rows, call.bias, launched.out, gradients, call.place)

    def _dispatch_gradients(self, handle: DispatchHandle, wire: str) -> autograd.DispatchGradients:
        """The backward of a combine."""

        def run(grad_out_TH: Tensor) -> Tensor:
            self._ready()
            with self._operation("combine_backward"):
                with Call(self._launcher, "backward of combine"):
                    call = self._checks.gradients_of_combine(grad_out_TH, handle, wire)
                    launched = self._launcher.dispatch(call, aside=False)
                self._finish(launched)
            return launched.outputs.rows

        return run

    def preparing(self, what: str) -> Call:
        """`with buffer.preparing("dispatch"):` around code that makes arguments: an error in it refuses the
        call.
        """
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
        require_own(self._pid)
        try:
            self._engine.check()
        except CommunicationError as error:
            self._remember(error)
            raise

    def wake(self) -> None:
        """Wakes the proxy before a captured graph is replayed after a pause of 10 ms or more.

        Optional, and useful only with several domains: otherwise the first operation waits about 150 us for
        the proxy thread. Call it right before `graph.replay()`. Operations outside graphs do it themselves.
        Raises `ClosedError`, and what `check` raises.
        """
        self._ready()
        if self.device.type == "cuda":
            self._engine.wake()

    def stats(self) -> dict[str, float]:
        """Counters since creation (`stats.py`); after `close` the last. `stats.format_stats` prints them."""
        if not self._closed:
            require_own(self._pid)
        return {**(self._last_stats if self._closed else self._engine.stats()), **self._clock.read()}

    def trace(self, path: str | os.PathLike[str], *, max_events: int = DEFAULT_EVENTS) -> Trace:
        """`with buffer.trace(path):` writes events to `<path>.rank<rank>.json`: see `trace.py`.

        Not collective. At least the first `max_events` (1 .. 2^24) events of each thread are kept, 56 bytes
        each, outside the budget. Raises `InputError` (path not writable, trace already running),
        `ClosedError`.
        """
        self._ready()
        return Trace(self._engine, self.rank, path, max_events)

    def memory_plan(self) -> MemoryPlan:
        """What this rank has allocated, by name; the total equals the bytes allocated."""
        return memory_plan(self._settled, self.topology, self.rank)

    def close(self, *, abort: bool = False) -> None:
        """Frees all threads and memory, even if the buffer is still referenced. Handles stay readable.

        Idempotent. Any thread may call it at any time, on a broken buffer, too. Raises no operation's error.
        Without `abort` it waits for this rank's operations and until all close, at most `progress_timeout_s`;
        Ctrl-C turns it into an abort. With `abort` it waits for no rank: pending operations raise
        `ClosedError` or a `CommunicationError` at once, those of peers `PeerFailed`. So a monitor thread can
        unblock waiting ranks. While one thread closes, `close` of another waits for it. After operations in
        a CUDA graph it waits as long for an idle GPU; a busy one keeps the memory. No replay may follow.
        """
        first, self._closed = not self._closed, True
        if os.getpid() != self._pid:
            self._finalizer()
            return
        if first:
            with contextlib.suppress(RuntimeError):  # a GPU in an error state
                self._last_stats = dict(self._engine.stats())
        try:
            leave(self._engine, self._error, abort=abort)
        finally:
            # Even after Ctrl-C, `leave` returns only when the engine is closed.
            self._finalizer.detach()
            self._in_flight.clear(self._launcher.wait_native)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(abort=kind is not None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._error is not None else "open"
        about = f"{self.topology}, {self.config.num_experts} experts, hidden {self.config.hidden}"
        return f"Buffer(rank {self.rank}, {about}, {self.config.wire.dispatch_dtype} dispatch, {state})"

    def _ready(self) -> None:
        if self._closed:
            raise ClosedError("the buffer is closed")
        self.check()

    def _finish(self, launched: Dispatched | Combined, *, aside: bool = False) -> None:
        """Finishes an operation on the caller's stream; aside: waits for one on its own."""
        require_own(self._pid)
        try:
            (self._launcher.wait if aside else self._launcher.finish)(launched)
        finally:
            self._in_flight.prune()

    def _operation(self, kind: str, *, starts: bool = True) -> Operation:
        return Operation(kind, self._clock, self._remember, starts=starts)

    def _remember(self, error: CommunicationError, doing: str = "") -> None:
        """The first communication error breaks the buffer: every later call raises it again."""
        explain(error, self._ranks, doing)
        if self._error is None:
            self._error = error.again()
