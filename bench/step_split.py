"""The parts of a step's dispatch and combine, and how busy the GPU is, for `megatron_step.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import BACKWARD, VALUE_BYTES, exchanges
from recipes.measure.timing import Span
from uccl_ep_train.oracle.fp8 import wire_row_bytes

_LINK_BYTES = 256 << 20
_LINK_RUNS = 5


class Traffic:
    """Counts the rows that routing sends from rank to rank in one domain, while `counting` is set."""

    def __init__(self, moe_layers: Iterable[Any]) -> None:
        self.counting = False
        self._maps: list[Tensor] = []
        for layer in moe_layers:
            dispatcher = layer.token_dispatcher
            dispatcher.dispatch_preprocess = self._seen(dispatcher.dispatch_preprocess)

    def wire_bytes(self, *, per_pair: bool, hidden: int, dtypes: tuple[str, str]) -> int:
        """Collective. Bytes that the busiest rank exchanges with others in a step, forward and backward.

        per_pair  one row travels for each expert of a token; else one for each rank that has such an expert
        dtypes    of the rows of dispatch, and of the gradients of combine
        """
        ranks, total = dist.get_world_size(), 0
        for routing_map in self._maps:
            wanted_TN = routing_map.view(len(routing_map), ranks, -1).sum(-1)
            own_2N = torch.stack([wanted_TN.sum(0), (wanted_TN > 0).sum(0)]).cpu()
            all_N2N = [torch.empty_like(own_2N) for _ in range(ranks)]
            dist.all_gather(all_N2N, own_2N)
            pairs_NN, rows_NN = torch.stack(all_N2N, 1)
            for dtype, weighted in exchanges(BACKWARD, *dtypes):
                moved_NN = (pairs_NN if per_pair else rows_NN) * wire_row_bytes(hidden, dtype)
                moved_NN += pairs_NN * VALUE_BYTES * weighted
                moved_NN.fill_diagonal_(0)
                total += int(max(moved_NN.sum(0).max(), moved_NN.sum(1).max()))
        self._maps.clear()
        return total

    def _seen(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch_preprocess(hidden: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
            if self.counting:
                self._maps.append(routing_map.detach().clone())
            return stage(hidden, routing_map, probs)

        return dispatch_preprocess


def waiting_ms(spans_R: Sequence[Sequence[Span]]) -> list[float] | None:
    """For each rank: how long it waited in dispatch and combine until the last rank began to move rows.

    None if the ranks did not go through the same stages.
    """
    moving_R = [[span for span in spans if span.moving] for spans in spans_R]
    kinds_R = [[span.kind for span in moving] for moving in moving_R]
    if any(kinds != kinds_R[0] for kinds in kinds_R):
        return None
    starts_RS = torch.tensor([[span.start_ms for span in moving] for moving in moving_R], dtype=torch.float64)
    return [float(waited) for waited in (starts_RS.amax(0) - starts_RS).sum(1)]


def link_gbytes_per_s() -> float:
    """Collective. Rate of NCCL's bare all-to-all out of a GPU: each rank's best run, on the slowest rank."""
    ranks = dist.get_world_size()
    sent = torch.ones(_LINK_BYTES // ranks * ranks, dtype=torch.uint8, device="cuda")
    received = torch.empty_like(sent)
    best = float("inf")
    for _ in range(_LINK_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        dist.all_to_all_single(received, sent)
        end.record()
        torch.cuda.synchronize()
        best = min(best, 1e-3 * begin.elapsed_time(end))
    slowest = torch.tensor([best], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return sent.numel() * (ranks - 1) / ranks / float(slowest) / 1e9


def gpu_busy(step: Callable[[], Any]) -> float:
    """The share of a step's time in which something ran on this rank's GPU, waiting kernels included.

    Runs the step under torch's profiler, which slows the host down: without it the share may be larger.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    ran = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and event.time_range.end > event.time_range.start
    ]
    return busy_share(ran)


def busy_share(ran: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first start to the last end that lies in at least one interval."""
    if not ran:
        return 0.0
    ordered = sorted(ran)
    busy, until = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / (until - ordered[0][0])
