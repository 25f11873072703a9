"""Measures one cell: one model per dispatcher, all in the same processes, which take turns step by step.

All models start with the same weights and get the same batches. A round is one step of each model. The order
rotates from round to round, so that a disturbance of the machine affects all models alike. Ratios are taken
within a round.
"""

from __future__ import annotations

import gc
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.flops import flops_per_token
from bench.ideal import Ideal
from bench.lineup import OURS_REFUSES, agree, describe
from bench.measure import start_together
from bench.step_cases import IDEAL, OURS, STOCK, Cell
from bench.step_report import Trained
from bench.step_split import Traffic, gpu_busy, waiting_ms
from bench.systems import on_one_host
from recipes.measure.timing import KINDS, DispatchClock, Span, sum_ms
from recipes.plan import devices
from recipes.training import dispatchers
from recipes.training.build import build
from recipes.training.data import Batches, build_batches
from recipes.training.loop import train_step
from uccl_ep_train.megatron import plugin

# Megatron rejects unsupported settings by assertions; older releases do not know some of the settings.
_REFUSES = (*OURS_REFUSES, AssertionError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Turn:
    """One counted step of one dispatcher on this rank.

    wall_ms                  from the common start
    dispatch_ms, combine_ms  forward and backward, see recipes/measure/timing.py
    cpu_ms                   processor time of all threads
    spans                    the stages whose times dispatch_ms and combine_ms sum up
    """

    wall_ms: float
    dispatch_ms: float
    combine_ms: float
    cpu_ms: float
    spans: list[Span]


class Contender:
    """A model with one dispatcher. The constructor and all methods are collective."""

    def __init__(self, dispatcher: str, cell: Cell) -> None:
        """Raises one of _REFUSES if the dispatcher cannot run the cell."""
        self.dispatcher = dispatcher
        stands_on = STOCK if dispatcher == IDEAL else dispatcher
        self._recipe = replace(cell.recipe, token_dispatcher=stands_on)
        before = _allocated()
        carrier = dispatchers.enable(self._recipe)
        if cell.overlap:
            carrier["overlap_moe_expert_parallel_comm"] = True
        self._training = build(self._recipe, carrier)
        dispatchers.verify(self._recipe, self._training)
        layers = list(self._training.moe_layers())
        if dispatcher == IDEAL:
            model = self._recipe.model
            for layer in layers:
                Ideal(layer.token_dispatcher, model.num_experts // self._recipe.num_ranks, model.topk)
        self._traffic = Traffic(layers)
        self._clock = DispatchClock(layers)
        self._wire_bytes = 0
        self._busy: float | None = None
        self._resident_bytes = _allocated() - before
        self._peak_bytes = 0
        self._turns: list[Turn] = []
        self._losses: list[float] = []

    def step(self, batches: Batches, number: int, *, counted: bool) -> None:
        before = _allocated()
        if devices.own().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._traffic.counting = number == 1
        cpu_start, start = time.process_time(), start_timing()
        self._clock.start()
        loss = train_step(self._training, batches, self._recipe, number)
        spans = self._clock.spans()  # waits for the GPU
        wall_ms, cpu_ms = 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - cpu_start)
        self._losses.append(loss)
        if number == 1:
            self._wire_bytes = self._count_wire()
        if counted:
            dispatch_ms, combine_ms = (sum_ms(spans, kind) for kind in KINDS)
            self._turns.append(Turn(wall_ms, dispatch_ms, combine_ms, cpu_ms, spans))
        # The peak without the other models: `before` counts all models, `_resident_bytes` only this one.
        self._peak_bytes = max(self._peak_bytes, _peak() - before + self._resident_bytes)
        self._resident_bytes += _allocated() - before

    def look_busy(self, batches: Batches, number: int) -> None:
        """Runs one more step, which does not count, to measure how busy the GPU is."""
        start_timing()
        step = partial(train_step, self._training, batches, self._recipe, number)
        self._busy = gpu_busy(step) if devices.own().type == "cuda" else None

    def _count_wire(self) -> int:
        recipe = self._recipe
        if self.dispatcher == IDEAL:
            return 0
        ours = self.dispatcher == OURS
        dtypes = (recipe.dispatch_dtype, recipe.grad_dtype) if ours else ("bf16", "bf16")
        return self._traffic.wire_bytes(per_pair=not ours, hidden=recipe.model.hidden_size, dtypes=dtypes)

    def trained(self, cell: Cell) -> Trained:
        on_gpu = devices.own().type == "cuda"
        outside = sum(buffer.memory_plan().total_bytes for buffer in plugin.buffers())
        own = {
            "turns": self._turns,
            "losses": self._losses,
            "peak": self._peak_bytes,
            "outside": outside,
            "rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "busy": self._busy,
        }
        ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        wall_RN, cpu_RN, dispatch_RN, combine_RN = (
            torch.tensor([[getattr(turn, name) for turn in r["turns"]] for r in ranks], dtype=torch.float64)
            for name in ("wall_ms", "cpu_ms", "dispatch_ms", "combine_ms")
        )
        waits = self.dispatcher != IDEAL
        waited = [
            waiting_ms(spans_R)
            for spans_R in zip(*([t.spans for t in r["turns"]] for r in ranks), strict=True)
        ]
        return Trained(
            dispatcher=self.dispatcher,
            losses_RN=[r["losses"] for r in ranks],
            wall_ms=wall_RN.max(0).values,
            cpu_ms=cpu_RN.sum(0),
            dispatch_ms=dispatch_RN.mean(0),
            combine_ms=combine_RN.mean(0),
            waiting_ms=_mean_of_ranks(waited) if waits else None,
            wire_bytes=self._wire_bytes,
            gpu_busy=min(r["busy"] for r in ranks) if on_gpu else None,
            slowest_rank=Counter(wall_RN.argmax(0).tolist()).most_common(1)[0][0],
            deterministic=not on_gpu or self._training.config.deterministic_mode,
            flops_per_token=flops_per_token(
                self._training.model.module.named_parameters(),
                self._training.config,
                cell.recipe.sequence_length,
            ),
            peak_torch_bytes=max(r["peak"] for r in ranks) if on_gpu else None,
            outside_torch_bytes=max(r["outside"] for r in ranks) if self.dispatcher == OURS else None,
            rss_bytes=max(r["rss"] for r in ranks),
        )

    def close(self) -> None:
        """Releases the model. Two things still refer to it through nodes of autograd: hooks of the data
        parallel wrapper, and a graph whose output a dispatcher keeps. Python's garbage collector cannot
        follow such references, so this method cuts them."""
        self._training.model.grad_accs.clear()
        for layer in self._training.moe_layers():
            layer.token_dispatcher = None


def _mean_of_ranks(waited: list[list[float] | None]) -> torch.Tensor | None:
    if any(ranks is None for ranks in waited):
        return None
    return torch.tensor(waited, dtype=torch.float64).mean(1)


def start_timing() -> float:
    """Collective. Returns the time when all ranks start.

    Several hosts have no common clock: there it is the time when this rank leaves a barrier.
    """
    devices.synchronize()
    if on_one_host():
        return start_together()
    dist.barrier()
    return time.perf_counter()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if devices.own().type == "cuda" else 0


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if devices.own().type == "cuda" else 0


def measure(
    cell: Cell, wanted: list[str], warmup: int, data_dir: Path, progress: Callable[[int, int], None]
) -> tuple[list[Trained], dict[str, str]]:
    """Collective. Returns what ran, in the order of `wanted`, and why each other dispatcher did not run."""
    refused: dict[str, str] = {}
    contenders: list[Contender] = []
    contender: Contender | None = None
    try:
        # Ours is last: once it is enabled, every MoE layer that is built must have our dispatcher.
        for dispatcher in sorted(wanted, key=lambda name: name == OURS):
            contender, reason = None, ""
            try:
                contender = Contender(dispatcher, cell)
            except _REFUSES as error:
                reason = describe(error)
            reason = agree(reason)
            if contender is None or reason:
                refused[dispatcher] = reason
            else:
                contenders.append(contender)
        batches, _ = build_batches(cell.recipe, data_dir)
        gc.disable()
        for index in range(cell.recipe.num_steps if contenders else 0):
            for turn in range(len(contenders)):
                contender = contenders[(index + turn) % len(contenders)]
                contender.step(batches, index + 1, counted=index >= warmup)
            gc.collect()  # between rounds, so that it is not part of a step
            progress(index + 1, cell.recipe.num_steps)
        for contender in contenders:
            contender.look_busy(batches, cell.recipe.num_steps + 1)
        trained = [entry.trained(cell) for entry in contenders]
    finally:
        gc.enable()
        plugin.disable()  # collective: it closes the buffers
        while contenders:
            contenders.pop().close()
        contender = None  # else it would keep the last model
        gc.collect()
    return sorted(trained, key=lambda entry: wanted.index(entry.dispatcher)), refused
