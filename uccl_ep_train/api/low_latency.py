"""`LowLatency`: dispatch and combine for decoding, where every expert has a slot for whatever can come.

No rank waits for counts, so calls have fixed shapes. On GPUs they never block the host, and can be captured
in CUDA graphs.

Shapes: T tokens of this rank, M the most tokens of any rank, R ranks, H hidden, K experts per token, L
experts of this rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer
from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.opaque import opaque_methods
from uccl_ep_train.common.slots import SlotHandle, SlotRows, SlotStatistics, SlotWireName
from uccl_ep_train.common.uncopied import Uncopied
from uccl_ep_train.core.low_latency import SlotEngine, SlotWire
from uccl_ep_train.core.slot_checks import SlotChecks
from uccl_ep_train.errors import ConfigError, DtypeError, InputError

_WIRES: dict[str, tuple[str, str]] = {
    "bf16": ("bf16", ""),
    "fp8": ("fp8", "pow2"),
    "fp8_fp32": ("fp8", "fp32"),
}
MOST_SENT = 2
"""Operations of a kind that may be sent and not received yet."""

Result = TypeVar("Result")


@opaque_methods
class Sent(Uncopied, Generic[Result]):
    """An operation whose rows are under way. No kernel of it runs until `receive`; on CPUs threads of the
    buffer send, and what others need of this rank comes.
    """

    instead = "its receive(), once"

    def __init__(self, queue: deque[Sent[Result]], result: Result, receive: Callable[[], None]) -> None:
        self.result = result
        """Its memory, which holds nothing yet."""
        self._queue = queue
        self._receive = receive
        queue.append(self)

    def receive(self) -> Result:
        """Launches what waits for the rows, on the current stream; on CPUs waits. Once, in the order of
        sending, and in the graph that the sending was captured in.

        Raises `InputError`.
        """
        if self not in self._queue:
            raise InputError("these rows were received before; allowed is one receive() of each")
        if self._queue[0] is not self:
            raise InputError("rows that were sent before these are not received; allowed is that order")
        self._receive()
        self._queue.popleft()
        return self.result


@opaque_methods
class LowLatency(Uncopied):
    """The low-latency calls of one buffer.

    buffer  of `EpConfig(low_latency_tokens=M, low_latency_topk=K)`, on all ranks

    Calls of each kind form one sequence, the same on every rank, beside the buffer's other operations. At
    most two of a kind may be sent and not received, by all `LowLatency` of a buffer together.

    With `mask_timeout_s` calls go on without a rank that no longer answers, or leaves alone: it is
    masked. Between domains its domain is, because each rank lands rows for all of its domain. All others
    agree on that before they use a result. No row of a masked rank comes, and its experts' rows are missing
    in sums; `stats()` counts these pairs. A masked rank that comes back, or has lost its domain, raises
    `PeerFailed`. Parts of a group that no network joins mask each other. The buffer's other operations raise
    when their deadlines are over.

    Raises `ConfigError` for a buffer without low_latency_tokens, `DtypeError`.
    """

    def __init__(self, buffer: Buffer) -> None:
        if not isinstance(buffer, Buffer):
            raise DtypeError(f"buffer is {type(buffer).__name__}; allowed is a Buffer")
        tokens = buffer.config.memory.low_latency_tokens
        if tokens is None:
            raise ConfigError("low_latency_tokens = None; allowed is the most tokens of any rank")
        self.buffer = buffer
        self.max_tokens = tokens
        self._checks = SlotChecks(buffer.config, buffer.device, buffer.num_ranks, tokens, object())
        # Those of all that are made of this buffer: a kernel receives what was sent first.
        queues: tuple[deque[Sent[SlotRows]], deque[Sent[Tensor]]] = (deque(), deque())
        self._dispatches, self._combines = vars(buffer).setdefault("_low_latency_queues", queues)
        # The one user of a buffer's engine beside the buffer.
        shape = buffer.num_ranks, self._checks.num_local, tokens
        wire_fp32 = buffer.config.wire.combine_wire_dtype == "fp32"
        self._engine = SlotEngine(buffer._engine, buffer.device, *shape, wire_fp32)

    # ---- dispatch

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        wire: SlotWireName = "fp8",
        ue8m0: bool = False,
        statistics: SlotStatistics | None = None,
    ) -> SlotRows:
        """Sends each token to the ranks of its experts, into slots of its experts.

        x             [T, H] bfloat16, contiguous; T at most M, may differ per rank and be 0
        topk_idx      [T, K] int64, -1: none
        topk_weights  [T, K] float32, on all ranks or on none. They travel with the routing, so that the
                      combine need not send them, and is faster. Do not change them before it
        wire          "fp8" with scales that are powers of two, "fp8_fp32" with unrounded ones, or "bf16";
                      equal on all ranks, as H and K
        ue8m0         scales come as exponents (`SlotRows`); with "fp8" only
        statistics    counters that the call adds to; see `SlotStatistics`

        Raises `InputError` before anything is launched; a refused call counts as in `Buffer.dispatch`.
        """
        return self._dispatch(x, (topk_idx, topk_weights), (wire, ue8m0), statistics, "both").receive()

    def send_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        wire: SlotWireName = "fp8",
        ue8m0: bool = False,
        statistics: SlotStatistics | None = None,
    ) -> Sent[SlotRows]:
        """As `dispatch`, but only sends, and waits for no rank. Until `receive()` the GPU's SMs are free for
        others. On CPUs what it is given is copied.
        """
        return self._dispatch(x, (topk_idx, topk_weights), (wire, ue8m0), statistics, "send")

    def _dispatch(
        self,
        x: Tensor,
        routing: tuple[Tensor, Tensor | None],
        form: tuple[SlotWireName, bool],
        statistics: SlotStatistics | None,
        phase: str,
    ) -> Sent[SlotRows]:
        """routing: topk_idx, topk_weights. form: wire, ue8m0"""
        buffer, engine, (wire, ue8m0) = self.buffer, self._engine, form
        buffer.check()
        with buffer.preparing("low-latency dispatch"):
            statistics = SlotStatistics() if statistics is None else statistics
            self._check_turn(self._dispatches, phase, "dispatches")
            self._checks.statistics(statistics)
            self._checks.dispatch(x, *routing, wire, ue8m0)
            travels = SlotWire(*_WIRES[wire], ue8m0)
            into = engine.new_rows(x, routing, travels, self._checks.owner)
            args = engine.dispatch_args(x, routing[0], travels, into, statistics)
            engine.dispatch(args, phase)
        rows = into.rows if isinstance(into.rows, Fp8Rows) else (into.rows,)
        kept = (*rows, *into.handle.kept, *statistics)
        return Sent(self._dispatches, into, self._receiver(engine.dispatch, args, phase, kept))

    # ---- combine

    def combine(
        self,
        rows: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: SlotHandle,
        *,
        out: Tensor | None = None,
        waited_ns: Tensor | None = None,
    ) -> Tensor:
        """Sums, for each token of this rank, the rows of its experts, times their weights.

        rows          [L, R * M, H] bfloat16, contiguous, in the slots of the dispatch
        topk_idx      [T, K] int64, as in the dispatch. An entry that has become -1 adds nothing
        topk_weights  [T, K] float32. On all ranks or on none both are None: those of the dispatch hold
        handle        of the dispatch
        out           [T, H] bfloat16 for the result, or None
        waited_ns     as in `SlotStatistics`

        Returns [T, H] bfloat16: sums are fp32, over a rank's experts ascending, then over ranks. The buffer's
        combine_wire_dtype is what each rank's sum is rounded to, and the one sum that another domain
        returns. Raises `InputError` before anything is launched.
        """
        return self._combine(rows, topk_idx, topk_weights, handle, (out, waited_ns, "both")).receive()

    def send_combine(
        self,
        rows: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: SlotHandle,
        *,
        out: Tensor | None = None,
        waited_ns: Tensor | None = None,
    ) -> Sent[Tensor]:
        """As `combine`, but only sends. With the weights of the dispatch it sends sums, as `combine` does.
        Else it sends rows as they are, which are more bytes.
        """
        return self._combine(rows, topk_idx, topk_weights, handle, (out, waited_ns, "send"))

    def _combine(
        self,
        rows: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: SlotHandle,
        given: tuple[Tensor | None, Tensor | None, str],
    ) -> Sent[Tensor]:
        """given: out, waited_ns, phase"""
        buffer, engine, (out, waited_ns, phase) = self.buffer, self._engine, given
        buffer.check()
        with buffer.preparing("low-latency combine"):
            self._check_turn(self._combines, phase, "combines")
            self._checks.statistics(SlotStatistics(None, waited_ns))
            out = self._checks.combine(rows, topk_idx, topk_weights, handle, out)
            told = None if topk_idx is None or topk_weights is None else (topk_idx, topk_weights)
            args = engine.combine_args(rows, handle, told, out, waited_ns)
            engine.combine(args, phase)
        kept = (rows, out, waited_ns, *handle.kept, *(told or ()))
        return Sent(self._combines, out, self._receiver(engine.combine, args, phase, kept))

    def masked_ranks(self) -> Tensor:
        """[R] int32: 1 for each rank that operations up to now do without (`EpConfig.mask_timeout_s`). All
        that are not masked agree.
        """
        self.buffer.check()
        return self._engine.masks()

    # ---- below

    def _receiver(
        self, launch: Callable[[object, str], None], args: object, phase: str, kept: tuple[Tensor | None, ...]
    ) -> Callable[[], None]:
        """kept: what receiving reads and writes."""
        if phase == "both":
            return lambda: None
        graph, captured_graph = self._engine.captured_graph(), self._engine.captured_graph
        on_gpu = self.buffer.device.type == "cuda"
        sent_on = torch.cuda.current_stream(self.buffer.device) if on_gpu else None

        def receive() -> None:
            if captured_graph() != graph:
                raise InputError(
                    "receive() is not captured in the graph that its sending is; allowed is the same"
                )
            launch(args, "receive")
            here = torch.cuda.current_stream(self.buffer.device) if on_gpu else None
            for tensor in kept:
                if here is not None and here != sent_on and tensor is not None:
                    tensor.record_stream(here)

        return receive

    def _check_turn(self, queue: deque[Sent[Result]], phase: str, kind: str) -> None:
        most = 0 if phase == "both" else MOST_SENT - 1
        if len(queue) > most:
            raise InputError(
                f"{len(queue)} {kind} were sent and not received; allowed are {most} before this call"
            )
