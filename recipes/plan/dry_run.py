"""Says what a recipe would do, without GPUs, other ranks or Megatron-LM: it needs megatron-core only.

Builds the model on the meta device, counts its parameters, estimates memory and traffic, and refuses what
does not fit.
"""

from __future__ import annotations

import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recipes.models.recipe import RecipeError
from recipes.plan import memory, parameters, traffic
from recipes.plan.arguments import command_line
from recipes.plan.jobs import Job
from recipes.plan.memory import Memory
from recipes.plan.parameters import Parameters
from uccl_ep_train.planner import report as planned
from uccl_ep_train.planner.protocol import fullest_plan

_DEDUPLICATES = {"uccl_ep": None, "flex-deepep": "bf16", "flex-hybridep": "bf16"}


class DoesNotFitError(RecipeError):
    """A rank needs more memory than its GPU has."""


@dataclass(frozen=True)
class Found:
    """What is found out about a job. `stock` and `ours` are None for a job without a node type."""

    job: Job
    parameters: Parameters
    memory: Memory
    stock: traffic.Traffic | None
    ours: traffic.Traffic | None  # None: a dispatcher that sends what the stock one sends
    times: traffic.Times | None = None  # of uccl_ep

    @property
    def gpu_bytes(self) -> int:
        return self.job.node.memory_bytes if self.job.node else 0

    def check(self) -> None:
        """Raises DoesNotFitError."""
        if self.job.node and self.memory.total_bytes > self.gpu_bytes:
            raise DoesNotFitError(
                f"{self.job.name} does not fit {self.job.node.name}: a rank of pipeline stage "
                f"{self.memory.stage} needs {_gib(self.memory.total_bytes)} and a GPU has "
                f"{_gib(self.gpu_bytes)}; give it more ranks, more pipeline stages or more recomputation"
            )


def inspect(job: Job) -> Found:
    """Raises BuildError, RecipeError or ConfigError for what Megatron-Core or the dispatcher refuses."""
    counted = parameters.count(job.model, job.layout, job.arguments)
    needed = _dispatcher_bytes(job) if job.dispatcher == "uccl_ep" else 0
    gpu_bytes = job.node.memory_bytes if job.node else 0
    needs = memory.of_fullest_rank(job.model, job.layout, counted, needed, gpu_bytes)
    if job.node is None:
        return Found(job, counted, needs, None, None)
    stock = traffic.of_stock_layer(job.model, job.layout, job.domain_size)
    if job.dispatcher not in _DEDUPLICATES:
        return Found(job, counted, needs, stock, None)
    dtype = _DEDUPLICATES[job.dispatcher] or job.dispatch_dtype
    ours = traffic.of_layer(job.model, job.layout, job.domain_size, dtype, job.grad_dtype)
    times = None
    if job.dispatcher == "uccl_ep":
        dtypes = (job.dispatch_dtype, job.grad_dtype)
        times = traffic.times_of_layer(
            job.model, job.layout, job.node.machine, job.domain_size, dtypes, job.budget_bytes
        )
    return Found(job, counted, needs, stock, ours, times)


def _dispatcher_bytes(job: Job) -> int:
    """Bytes of the buffer that all layers share, on the rank that needs most. The plug-in's checks of the
    model run, too: ConfigError.

    If the extension was built without CUDA kernels, the memory plan of a GPU is not known: it may take its
    whole budget.
    """
    import torch

    from uccl_ep_train import Topology
    from uccl_ep_train.core import cuda
    from uccl_ep_train.megatron.buffers import BufferPool

    options: dict[str, str | int | None] = {
        "dispatch_dtype": job.dispatch_dtype,
        "grad_dtype": job.grad_dtype,
        "budget_bytes": job.budget_bytes,
        "window_tokens": job.layout.tokens_per_pass,
        "backend": "cuda" if job.node and cuda.built() else "host",
    }
    model = SimpleNamespace(
        params_dtype=torch.bfloat16, num_moe_experts=job.model.num_experts, hidden_size=job.model.hidden_size
    )
    config = BufferPool(options).ep_config(model, 1, job.layout.ep)
    plan = fullest_plan(config, Topology.split(job.layout.ep, job.domain_size))
    return plan.total_bytes if config.gpu.backend == "cuda" else max(plan.total_bytes, job.budget_bytes)


def report(found: Found) -> str:
    """The report as text."""
    job = found.job
    lines = [
        f"recipe {job.name}, {job.layout.num_ranks} ranks"
        + (f", {job.node.name}: {_gib(job.node.memory_bytes)} a GPU" if job.node else ", any machine"),
        f"dispatcher {job.dispatcher}" + (f", because {job.why_dispatcher}" if job.why_dispatcher else ""),
        "",
        "Megatron arguments:",
        *_wrapped(command_line(job.arguments)),
        "",
        *_parameter_lines(found.parameters),
        "",
        *_memory_lines(found),
        "",
        *_traffic_lines(found),
    ]
    return "\n".join(lines)


def _wrapped(words: list[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if word.startswith("--"):
            lines.append("  " + word)
        else:
            lines[-1] += " " + shlex.quote(word)
    return lines


def _parameter_lines(p: Parameters) -> list[str]:
    each = sorted({s.total for s in p.stages})
    return [
        f"parameters, counted in Megatron's own modules: {_billions(p.total)} in total, "
        f"{_billions(p.active)} active, {_billions(p.active - p.input_embedding)} without the input embedding"
        + (f"; multi-token prediction {_billions(p.mtp)} more" if p.mtp else ""),
        f"  a rank holds {_billions(each[0])}" + (f" to {_billions(each[-1])}" if len(each) > 1 else ""),
    ]


def _memory_lines(found: Found) -> list[str]:
    needs = found.memory
    lines = [
        f"memory of a rank, pipeline stage {needs.stage} of {found.job.layout.pp} (the fullest), estimated:"
    ]
    lines += [f"  {name:55s} {_gib(size):>11s}" for name, size in needs.entries]
    total = f"  {'total':55s} {_gib(needs.total_bytes):>11s}"
    if found.job.node is None:
        return [*lines, total]
    fits = needs.total_bytes <= found.gpu_bytes
    return [*lines, f"{total}  of {_gib(found.gpu_bytes)}: {'fits' if fits else 'DOES NOT FIT'}"]


def _traffic_lines(found: Found) -> list[str]:
    job = found.job
    layout = job.layout
    passes = layout.num_microbatches
    layers = max(moe for _, moe in memory.layer_counts(job.model, layout))
    lines = [
        f"a step: {layout.global_batch_size} sequences of {layout.sequence_length}, {passes} micro-batches "
        f"of {layout.tokens_per_pass} tokens a rank, {layers} MoE layers in the fullest stage"
    ]
    if job.node is None or found.stock is None:
        return [*lines, "traffic and times are not predicted: the recipe is for any machine"]
    times = passes * layers
    shown = found.ours or found.stock
    lines += [
        f"bytes that leave a rank, uniform routing, expert parallel group of {layout.ep} ranks in "
        f"{-(-layout.ep // job.domain_size)} domains:",
        f"  {'':34s} {'in the domain':>14s} {'on the NIC':>14s}",
    ]
    rows = [
        ("dispatch, a layer", shown.dispatch),
        ("combine, a layer", shown.combine),
        ("forward + backward, a step", shown.total * times),
        ("the stock alltoall's, a step", found.stock.total * times),
    ]
    lines += [f"  {name:34s} {_size(b.link):>14s} {_size(b.nic):>14s}" for name, b in rows]
    if shown.again:
        lines.append("  (recomputation repeats dispatch and combine in backward)")
    return lines + _time_lines(found, times)


def _time_lines(found: Found, layers: int) -> list[str]:
    """`layers`: of all micro-batches of a step."""
    job = found.job
    assert job.node is not None and found.stock is not None
    machine = job.node.machine
    shown = found.ours or found.stock
    wire = f"{shown.wire_seconds(machine) * layers:.3f} s"
    if found.times is None:
        return [
            f"time on the wire, a step: {wire}; what {job.dispatcher} takes beyond its bytes is not predicted"
        ]
    stock = found.stock.wire_seconds(machine) * layers
    return [
        *planned.lines(found.times.found),
        f"predicted: all of a step {found.times.total_us * 1e-6 * layers:.3f} s (bytes alone {wire}, "
        f"those of the stock alltoall {stock:.3f} s)",
    ]


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e10 else f"{num_bytes / 1e6:,.1f} MB"


def run(job: Job, picture: Path | None = None) -> Any:
    """Prints the report, and draws how long ports are busy. Raises what `inspect` and `Found.check` raise."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")  # advice about packages for GPUs
    if picture is not None and (job.node is None or job.dispatcher != "uccl_ep"):
        raise RecipeError(
            f"--picture {picture}: {job.name} by {job.dispatcher} has no planned times; "
            "allowed is uccl_ep on a node type"
        )
    parameters.prepare()
    found = inspect(job)
    print(report(found))
    if picture is not None and found.times is not None:
        planned.draw_ports(found.times.found, picture)
        print(f"picture: {picture}")
    found.check()
    return found
