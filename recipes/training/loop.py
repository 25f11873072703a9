"""The training loop of a recipe; every function here runs on every rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from recipes.measure import proof
from recipes.measure.metrics import Reporter, StepMetrics
from recipes.measure.router_trace import RouterTrace
from recipes.measure.timing import DispatchClock
from recipes.models.recipe import Recipe
from recipes.training import dispatchers
from recipes.training.build import Training, build
from recipes.training.checkpoint import Checkpoints
from recipes.training.data import Batches, build_batches


@dataclass
class _Stop:
    """Set by SIGINT or SIGTERM; the ranks agree on it between two steps."""

    requested: bool = False
    signals: tuple[signal.Signals, ...] = field(default=(signal.SIGINT, signal.SIGTERM))

    def listen(self) -> None:
        for number in self.signals:
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True


class Validated(NamedTuple):
    """A validation after `step`, in nats per byte."""

    step: int
    loss: float


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `finished` is false after Ctrl-C. `validated` is the last validation that it made."""

    finished: bool
    step: int
    validated: Validated | None
    seconds: float

    def __str__(self) -> str:
        state = "finished" if self.finished else "stopped, the same command resumes it,"
        said = "no validation"
        if self.validated is not None:
            when = "" if self.validated.step == self.step else f" at step {self.validated.step}"
            said = f"validation loss {self.validated.loss:.4f} nats per byte{when}"
        return f"{state} at step {self.step}, {said}, {self.seconds:.0f} s"


def _forward_step(
    batches: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """return_schedule_plan: what Megatron's schedule for overlapped communication wants instead of losses."""
    batch = next(batches)
    run = model.build_schedule_plan if return_schedule_plan else model
    result = run(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return result, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(mask_BS: torch.Tensor, losses_BS: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = (losses_BS.float() * mask_BS).sum() / mask_BS.sum()
    return loss, {"loss": loss.detach().clone()}  # Megatron scales the first one in place


def _passes(
    training: Training, batches: Iterator[Any], recipe: Recipe, num: int, forward_only: bool
) -> float:
    """Runs `num` forward (and backward) passes of this rank, and returns their mean loss."""
    done = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches,
        model=[training.model],
        num_microbatches=num,
        seq_length=recipe.sequence_length,
        micro_batch_size=recipe.micro_batch_size,
        forward_only=forward_only,
    )
    return sum(float(d["loss"]) for d in done) / num


def train_step(training: Training, batches: Batches, recipe: Recipe, step: int) -> float:
    """Runs step `step` (the first is 1): forward, backward, optimizer. Returns this rank's mean loss."""
    first = (step - 1) * recipe.num_microbatches
    stream = (batches.micro_batch(first + i) for i in range(recipe.num_microbatches))
    training.model.zero_grad_buffer()
    training.optimizer.zero_grad()
    loss = _passes(training, stream, recipe, recipe.num_microbatches, forward_only=False)
    updated, _norm, _zeros = training.optimizer.step()
    if updated:
        training.scheduler.step(increment=1)
    return loss


def _validate(training: Training, batches: Batches, recipe: Recipe) -> float:
    """Mean loss of the fixed validation batches over all ranks."""
    training.model.eval()
    stream = (batches.micro_batch(i) for i in range(recipe.val_batches))
    with torch.no_grad():
        total = torch.tensor(_passes(training, stream, recipe, recipe.val_batches, forward_only=True))
    training.model.train()
    dist.all_reduce(total)
    return float(total) / recipe.num_ranks


def _agree(loss: float, stop: _Stop, recipe: Recipe) -> tuple[float, bool]:
    """Mean loss over the ranks, and whether any of them was told to stop."""
    shared = torch.tensor([loss, float(stop.requested)])
    dist.all_reduce(shared)
    return float(shared[0]) / recipe.num_ranks, bool(shared[1] > 0)


def set_up(recipe: Recipe, backend: str) -> None:
    """Process groups: all ranks in one expert parallel group, attention data parallel.

    backend  for torch.distributed, from `devices.join`
    """
    torch.set_num_threads(recipe.threads_per_rank)
    dist.init_process_group(backend)
    if dist.get_world_size() != recipe.num_ranks:
        raise ValueError(f"recipe {recipe.name} wants {recipe.num_ranks} ranks, not {dist.get_world_size()}")
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=recipe.num_ranks, expert_tensor_parallel_size=1
    )


def run(
    recipe: Recipe,
    run_dir: Path,
    data_dir: Path,
    router_trace: Path | None = None,
    start_from: Path | None = None,
    stop_at: int | None = None,
) -> Outcome:
    """Trains to the recipe's last step or to a signal, resuming from the newest checkpoint in `run_dir`.

    router_trace  where to save what the routers chose, see `router_trace.py`
    start_from    folder of another run, to go on from its newest checkpoint while `run_dir` has none; it may
                  have had another dispatcher
    stop_at       step after which to save a checkpoint and stop as if by a signal
    """
    stop = _Stop()
    stop.listen()
    training = build(recipe, dispatchers.enable(recipe))
    dispatchers.verify(recipe, training)
    dispatchers.ablate(recipe, training.moe_layers())
    clock = DispatchClock(training.moe_layers())
    trace = RouterTrace(router_trace, training.moe_layers(), recipe)
    train_batches, val_batches = build_batches(recipe, data_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints", recipe)
    first_step = checkpoints.restore(training)
    if first_step == 0 and start_from is not None:
        first_step = Checkpoints(start_from / "checkpoints", recipe, of_another=True).restore(training)
    reporter = None
    if dist.get_rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        reporter = Reporter(run_dir / "metrics.jsonl", recipe.num_steps, first_step, recipe.token_dispatcher)
        reporter.say(
            f"{training.num_parameters() / 1e6:.1f} M parameters, {recipe.num_ranks} ranks, {recipe.device}, "
            f"{recipe.tokens_per_step} tokens a step; step {first_step} of {recipe.num_steps}"
        )
    started = time.perf_counter()
    step, stopped, validated = first_step, False, None
    if first_step == 0 or first_step == recipe.num_steps:
        validated = Validated(first_step, _validate(training, val_batches, recipe))
        if reporter:
            reporter.say(f"validation loss {validated.loss:.4f} nats per byte at step {first_step}")
    while step < recipe.num_steps and not stopped:
        step += 1
        clock.take()
        step_started = time.perf_counter()
        own_loss = train_step(training, train_batches, recipe, step)
        trace.after_step(step)
        train_loss, stopped = _agree(own_loss, stop, recipe)
        stopped |= step == stop_at
        spent = clock.take()  # waits for the GPU, so the next line measures the whole step
        seconds = time.perf_counter() - step_started
        last = step == recipe.num_steps
        step_val = (
            _validate(training, val_batches, recipe) if step % recipe.val_interval == 0 or last else None
        )
        validated = validated if step_val is None else Validated(step, step_val)
        if reporter:
            metrics = StepMetrics(
                step=step,
                train_loss=train_loss,
                val_loss=step_val,
                tokens_per_s=recipe.tokens_per_step / seconds,
                dispatch_ms=spent["dispatch"],
                combine_ms=spent["combine"],
                dispatcher=recipe.token_dispatcher,
            )
            reporter.step(metrics, 1e3 * seconds)
        regular = recipe.checkpoint_interval and (step % recipe.checkpoint_interval == 0 or last or stopped)
        if regular or step == stop_at:
            checkpoints.save(training, step)
    if reporter:
        reporter.close()
    if step == recipe.num_steps:
        _prove(recipe, training, val_batches)
    return Outcome(step == recipe.num_steps, step, validated, time.perf_counter() - started)


def _prove(recipe: Recipe, training: Training, batches: Batches) -> None:
    if recipe.token_dispatcher != "uccl_ep":
        return
    if recipe.domain_size == recipe.num_ranks:
        if dist.get_rank() == 0:
            print(
                "all ranks are in one domain: no row crosses to another, nothing is to be proved", flush=True
            )
        return
    training.model.eval()
    with torch.no_grad():
        stream = iter([batches.micro_batch(0)])
        crossings = proof.measure(
            list(training.moe_layers()),
            recipe,
            lambda: _passes(training, stream, recipe, 1, forward_only=True),
        )
    if dist.get_rank() == 0 and crossings:
        print(proof.table(crossings), flush=True)


def describe(recipe: Recipe) -> str:
    """Every setting and its value, one a line."""
    return "\n".join(f"  {name} = {value!r}" for name, value in asdict(recipe).items())
