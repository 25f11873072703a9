"""Chooses the systems that run a case, and keeps the reason why any other requested system does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from bench import deep_ep_peers
from bench.cases import Case
from bench.memcpy import Memcpy
from bench.peers import BareAllToAll, MegatronAllToAll
from bench.ranks import lacks_nccl, too_many_sms
from bench.systems import MODE_SUFFIX, System, UcclEp, label_of
from bench.torch_alone import TorchAlone
from uccl_ep_train import Buffer, errors

# As in results; there all_to_all has its library in front, and deep_ep is what can be imported.
SYSTEMS = (
    "uccl_ep",
    "uccl_ep_sync_free",
    "uccl_ep_cached",
    "megatron_alltoall",
    "all_to_all",
    "deep_ep",
    "memcpy",
    "torch_autograd",
)

# Errors which say that a system cannot run a case. Any other error is a fault, and ends the benchmark.
OURS_REFUSES = (errors.InputError, errors.ConfigError, MemoryError, torch.OutOfMemoryError)
# A peer of another version lacks a call, or takes other arguments.
REFUSES = (RuntimeError, AssertionError, ImportError, MemoryError, OSError, AttributeError, TypeError)


@dataclass
class Lineup:
    """refused: the reason why a system does not run the case, by the system's label in the table."""

    case: Case
    buffer: Buffer | None = None
    systems: list[System] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def add(self, label: str, make: Callable[[], System]) -> None:
        """Collective. Adds a peer; on GPUs it needs NCCL."""
        if lacks_nccl():
            self.refused[label] = "not with --share-gpus: needs NCCL"
            return
        try:
            system, reason = make(), ""
        except REFUSES as error:
            reason = describe(error)
        reason = agree(reason)
        if reason:
            self.refused[label] = reason
        else:
            self.systems.append(system)

    def drop(self, system: System, reason: str) -> None:
        self.systems.remove(system)
        self.refused[system.label] = reason

    def close(self) -> None:
        """Collective."""
        if self.buffer is not None:
            self.buffer.close()
        for system in self.systems:
            if not isinstance(system, UcclEp):
                system.close()


def why_not(system: str, *, backward: bool) -> str:
    """Why one of `SYSTEMS` has nothing to run here, or ""."""
    on_gpu = torch.cuda.is_available()
    if system == "deep_ep":
        return deep_ep_peers.lacking()
    if system == "memcpy" and on_gpu:
        return "it is the floor on CPUs"
    if system == "torch_autograd" and not (backward and on_gpu):
        return "it is for --backward on GPUs"
    return ""


def line_up(case: Case, asked: list[str] | None, *, backward: bool, compact: bool) -> Lineup:
    """Collective. asked: None for all that have something to run. compact: adds systems of ours with compact
    rows, one row per token and rank."""
    lineup = Lineup(case)
    reasons = {system: why_not(system, backward=backward) for system in asked or SYSTEMS}
    if asked:
        lineup.refused |= {system: reason for system, reason in reasons.items() if reason}
    wanted = [system for system, reason in reasons.items() if not reason]
    _add_ours(lineup, wanted, backward, compact)
    if "megatron_alltoall" in wanted:
        lineup.add("megatron_alltoall bf16", lambda: MegatronAllToAll(case, backward=backward))
    if "all_to_all" in wanted:
        lineup.add(f"{BareAllToAll.collectives()}_all_to_all bf16", lambda: BareAllToAll(case))
    if "deep_ep" in wanted:
        for label, make in deep_ep_peers.importable(case):
            lineup.add(label, make)
    if "memcpy" in wanted:
        lineup.add(f"memcpy {case.dtype}", lambda: Memcpy(case))
    if "torch_autograd" in wanted:
        lineup.add("torch_autograd bf16", lambda: TorchAlone(case))
    return lineup


def _add_ours(lineup: Lineup, wanted: list[str], backward: bool, compact: bool) -> None:
    case = lineup.case
    names = {mode: UcclEp.name + suffix for mode, suffix in MODE_SUFFIX.items()}
    modes = {mode: label_of(name, "", case.dtype) for mode, name in names.items() if name in wanted}
    if not modes:
        return
    try:
        # If this fails on one rank, it fails on all ranks at once.
        buffer = lineup.buffer = UcclEp.create_buffer(case)
    except errors.EpError as error:
        lineup.refused |= dict.fromkeys(modes.values(), describe(error))
        return
    if reason := too_many_sms(buffer.config):
        lineup.refused |= dict.fromkeys(modes.values(), reason)
        return
    layouts = ["expert_major"]
    if buffer.device.type == "cuda" and case.dtype == "fp8":
        layouts.append("expert_major_fp8")
    if compact:
        layouts.append("compact")
    lineup.systems += [
        UcclEp(buffer, case.dtype, mode=mode, layout=layout, backward=backward)
        for layout in layouts
        for mode in modes
    ]


def describe(error: BaseException) -> str:
    """The error as one line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"


def agree(reason: str) -> str:
    """Collective: the reason of the first rank that has one."""
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((f"{found} (rank {rank})" for rank, found in enumerate(reasons) if found), "")
