"""Check `memory`: whether /dev/shm, the cgroup and the GPU have enough memory for a buffer of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from uccl_ep_train.common.limits import SHARED_MEMORY, UNLIMITED, shared_memory_fault
from uccl_ep_train.core import cuda
from uccl_ep_train.core.stats import MemoryPlan, memory_plan
from uccl_ep_train.tools.doctor.findings import Facts, Finding, Group, Said, each, fine, fix
from uccl_ep_train.tools.doctor.limits import cgroup_limits
from uccl_ep_train.tools.doctor.session import Here, Options

NAME = "memory"
MIB = 1 << 20
_OF_HOST, _PINNED = "host.", "host.pinned"
"""How the plan of a GPU's buffer names what lies on the host, and what of it is not in /dev/shm."""


def look(here: Here) -> dict[str, Any]:
    config = here.usable_config() if here.settled is None else here.settled.config
    plan = memory_plan(config, here.topology(), here.group.index(here.me.rank))
    facts = split(plan, on_gpu=cuda.choose_device(config).type == "cuda")
    facts["shm_fault"] = shared_memory_fault()
    space = None if facts["shm_fault"] else os.statvfs(SHARED_MEMORY)
    facts["shm_free_bytes"] = space.f_bavail * space.f_frsize if space else 0
    facts["shm_total_bytes"] = space.f_blocks * space.f_frsize if space else 0
    facts["memory_left_bytes"] = cgroup_limits()["memory_left_bytes"]
    facts["gpu_free_bytes"] = UNLIMITED
    if here.gpu >= 0:
        import torch

        facts["gpu_free_bytes"] = torch.cuda.mem_get_info(here.gpu)[0]
    return facts


def split(plan: MemoryPlan, *, on_gpu: bool) -> dict[str, Any]:
    """Where the plan's bytes lie: shared memory of the host, or the GPU."""
    on_host = plan.total_bytes
    if on_gpu:
        on_host = sum(size for name, size in plan.entries if name.startswith(_OF_HOST) and name != _PINNED)
    return {
        "shm_bytes": on_host,
        "gpu_bytes": plan.total_bytes - on_host if on_gpu else 0,
        "least_bytes": plan.least_budget_bytes,
        "budget_bytes": plan.budget_bytes,
    }


def judge(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    def of_rank(rank: int, seen: Facts) -> list[Said]:
        ranks = [peer for peer in group.neighbours(rank) if peer in facts]
        need = sum(facts[peer]["shm_bytes"] for peer in ranks)
        said = [*_shared(seen, need, len(ranks)), *_cgroup(seen, need, len(ranks)), *_gpu(seen)]
        where = f"{seen['gpu_bytes'] / MIB:.0f} MiB on its GPU and " if seen["gpu_bytes"] else ""
        return said or [
            fine(
                f"a buffer takes {where}{seen['shm_bytes'] / MIB:.0f} MiB of /dev/shm a rank "
                f"(hidden {options.hidden}), which has {seen['shm_total_bytes'] / MIB:.0f}"
            )
        ]

    return each(NAME, facts, of_rank)


def _shared(seen: Facts, need: int, ranks: int) -> list[Said]:
    if seen["shm_fault"]:
        text, remedy = seen["shm_fault"]
        return [fix(text, remedy)]
    free, total = seen["shm_free_bytes"], seen["shm_total_bytes"]
    if need <= free:
        return []
    text = (
        f"/dev/shm has {free / MIB:.0f} of {total / MIB:.0f} MiB free; a buffer of the {ranks} ranks "
        f"here takes "
        f"{need / MIB:.0f} MiB"
    )
    wanted = f"{-(-2 * need // (1 << 30))}g"
    remedy = (
        f"Docker: --shm-size={wanted}, or --ipc=host; Kubernetes: an emptyDir with medium: Memory at "
        f"/dev/shm;\n"
        f"a host: mount -o remount,size={wanted} /dev/shm"
    )
    if free // ranks >= seen["least_bytes"]:
        smaller = free // ranks // MIB
        remedy += f"\nor a smaller one: UCCL_EP_BUDGET_BYTES={smaller}M (least: {seen['least_bytes']} bytes)"
    return [fix(text, remedy)]


def _cgroup(seen: Facts, need: int, ranks: int) -> list[Said]:
    left = seen["memory_left_bytes"]
    if left == UNLIMITED or need <= left:
        return []
    return [
        fix(
            f"the cgroup leaves {left / MIB:.0f} MiB of memory; the buffers of {ranks} ranks take "
            f"{need / MIB:.0f} MiB",
            "raise it: Slurm --mem=0, Docker --memory, Kubernetes resources.limits.memory (shared "
            "memory counts there)",
        )
    ]


def _gpu(seen: Facts) -> list[Said]:
    free = seen["gpu_free_bytes"]
    if free == UNLIMITED or seen["gpu_bytes"] <= free:
        return []
    return [
        fix(
            f"the GPU has {free / MIB:.0f} MiB free; a buffer takes {seen['gpu_bytes'] / MIB:.0f} MiB",
            "look at nvidia-smi for what else runs there, or set UCCL_EP_BUDGET_BYTES",
        )
    ]
