"""Check `dispatch`: dispatches and combines a small batch and compares it with the oracle.

Every rank makes the tokens of all ranks of its group from their numbers, so that each can work out alone what
has to come back, bit for bit. Shapes: T tokens of a rank (differs per rank), H hidden, K experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer
from uccl_ep_train.core.stats import memory_plan
from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import CommunicationError, MemoryBudgetError
from uccl_ep_train.group.bootstrap import Bootstrap
from uccl_ep_train.oracle.reference import ReferenceGroup, Routing
from uccl_ep_train.settings.checks import Value
from uccl_ep_train.settings.config import EpConfig
from uccl_ep_train.settings.sections import WireDtype
from uccl_ep_train.tools.doctor.findings import FIX, Facts, Finding, Group, Said, each, fine, fix
from uccl_ep_train.tools.doctor.network import bootstrap_of
from uccl_ep_train.tools.doctor.session import Here, Options, Skipped

NAME = "dispatch"
HIDDEN = 1024
EXPERTS_OF_RANK = 2
BUDGET_BYTES = 64 << 20
WIRES: tuple[WireDtype, ...] = ("bf16", "fp8")


@dataclass(frozen=True)
class Batch:
    """By rank: x [T, H] bfloat16, experts [T, K] int64, weights [T, K] float32."""

    x: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    num_experts: int


def make_batch(num_ranks: int) -> Batch:
    """The same on every rank. Ranks have 40, 56, 72, 40, ... tokens."""
    num_experts = EXPERTS_OF_RANK * num_ranks
    topk = min(4, num_experts)
    batch = Batch([], [], [], num_experts)
    for rank in range(num_ranks):
        made = torch.Generator(device="cpu").manual_seed(1 + rank)
        num_tokens = 40 + 16 * (rank % 3)
        batch.x.append(_random(num_tokens, HIDDEN, made).bfloat16())
        batch.topk_idx.append(_random(num_tokens, num_experts, made).topk(topk).indices)
        batch.topk_weights.append(_random(num_tokens, topk, made))
    return batch


def _random(rows: int, columns: int, made: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=made, device="cpu")


def expert(rows: Tensor, rank: int) -> Tensor:
    """What the experts of a rank make of their rows: exact, and another for its neighbours."""
    return rows * 2.0 ** (rank % 3 - 1)


def look(here: Here) -> dict[str, Any]:
    if here.settled is None:
        raise Skipped("no transport was chosen, see there")
    config = small(here.usable_config(), here.settled.topology, here.options.timeout_s)
    try:
        return rehearse(bootstrap_of(here, NAME), config)
    except CommunicationError as error:
        # Ranks of a group count from 0; messages use those of the job.
        peer = "" if error.peer < 0 else f" (rank {here.group[error.peer]} of the job)"
        raise type(error)(f"{error}{peer}", **error.fields()) from error


def small(config: EpConfig, topology: Topology, timeout_s: float) -> EpConfig:
    """The job's settings, but for sizes and patience."""
    patience_s = 0.4 * timeout_s
    changes: dict[str, Value] = {
        "num_experts": EXPERTS_OF_RANK * topology.num_ranks,
        "hidden": HIDDEN,
        "budget_bytes": min(config.memory.budget_bytes, BUDGET_BYTES),
        "chunk_bytes": None,
        "window_chunks": None,
        "arrival_timeout_s": min(config.deadlines.arrival_timeout_s, patience_s),
        "progress_timeout_s": min(config.deadlines.progress_timeout_s, patience_s),
    }
    config = config.replace(**changes)
    try:
        least = memory_plan(config, topology).least_budget_bytes
    except MemoryBudgetError:
        return config.replace(budget_bytes=1 << 30)
    return config.replace(budget_bytes=max(config.memory.budget_bytes, least))


def rehearse(bootstrap: Bootstrap, config: EpConfig) -> dict[str, Any]:
    """Collective. `wrong`: what differs from the oracle, in words."""
    batch = make_batch(bootstrap.size)
    started = time.monotonic()
    wrong: list[str] = []
    with Buffer(None, config, bootstrap=bootstrap) as buffer:
        created_s = time.monotonic() - started
        for wire in WIRES:
            wrong += compare(buffer, batch, wire)
        stats = buffer.stats()
        return {
            "wrong": wrong,
            "transport": buffer.transport,
            "num_ranks": buffer.num_ranks,
            "num_domains": buffer.topology.num_domains,
            "device": buffer.device.type,
            "created_s": created_s,
            "seconds": time.monotonic() - started,
            "wire_bytes": sum(
                int(value) for name, value in stats.items() if name.startswith("ship.") and "bytes" in name
            ),
        }


def compare(buffer: Buffer, batch: Batch, wire: WireDtype) -> list[str]:
    """One dispatch and its combine."""
    rank, ranks = buffer.rank, range(buffer.num_ranks)
    oracle = ReferenceGroup(
        buffer.topology.domain_of,
        batch.num_experts,
        combine_wire_dtype=buffer.config.wire.combine_wire_dtype,
        fp8_scale=buffer.config.wire.fp8_scale,
    )
    routings = [
        Routing.from_topk(batch.topk_idx[peer], batch.topk_weights[peer], batch.num_experts) for peer in ranks
    ]
    wanted = oracle.dispatch(batch.x, routings, dispatch_dtype=wire)
    assert wanted.row_weights is not None
    back_TH = oracle.combine_of(rank, [expert(wanted.rows[peer], peer) for peer in ranks], wanted.plan)

    there = [
        tensor.to(buffer.device) for tensor in (batch.x[rank], batch.topk_idx[rank], batch.topk_weights[rank])
    ]
    got = buffer.dispatch(*there, dispatch_dtype=wire)
    rows_RH, weights_R = got.rows, got.row_weights
    assert isinstance(rows_RH, Tensor) and weights_R is not None
    out_TH = buffer.combine(expert(rows_RH, rank), got.handle)
    return [
        f"{wire} {what}: {difference}"
        for what, seen, right in (
            ("rows at the experts", rows_RH, wanted.rows[rank]),
            ("their weights", weights_R, wanted.row_weights[rank]),
            ("sums at the source", out_TH, back_TH),
        )
        if (difference := _difference(seen, right))
    ]


def _difference(seen: Tensor, right: Tensor) -> str:
    """ "" if equal to the last bit."""
    seen = seen.detach().cpu()
    if seen.shape != right.shape or seen.dtype != right.dtype:
        return f"{seen.dtype} {list(seen.shape)} instead of {right.dtype} {list(right.shape)}"
    # Not by value: -0.0 equals 0.0.
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[right.dtype]
    unequal = seen.contiguous().view(bits) != right.contiguous().view(bits)
    if not unequal.any():
        return ""
    rows = unequal.reshape(len(right), -1).any(dim=1).nonzero().flatten()
    return f"{len(rows)} of {len(right)} rows differ, the first is row {int(rows[0])}"


def judge(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    def of_rank(_: int, seen: Facts) -> list[Said]:
        if seen["wrong"]:
            return [
                fix(
                    f"what {seen['transport']} brought is not what was sent: {'; '.join(seen['wrong'])}",
                    "do not train on this. One host: its memory, GPU or NIC (dmesg, ECC errors, "
                    "nvidia-smi -q -d ECC).\n"
                    "All hosts: ranks with different builds (check `versions`); else please report it",
                )
            ]
        wire = "inside one domain, no NIC was used"
        if seen["num_domains"] > 1:
            wire = f"{seen['num_domains']} domains over {seen['transport']}"
        return [
            fine(
                f"{_count(seen['num_ranks'])} dispatched and combined, BF16 and FP8, on {seen['device']}: "
                f"equal to the oracle to the last bit ({wire})"
            )
        ]

    found = each(NAME, facts, of_rank)
    silent = tuple(
        rank
        for rank, seen in facts.items()
        if seen["num_domains"] > 1 and not seen["wrong"] and not seen["wire_bytes"]
    )
    if silent:
        found.append(
            Finding(
                NAME, FIX, "no byte left the domain, though there are several", "please report it", silent
            )
        )
    return found


def _count(ranks: int) -> str:
    return f"{ranks} ranks" if ranks > 1 else "one rank"
