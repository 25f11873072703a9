"""Check `limits`: the system's limits for a process: locked memory, files, threads, cores, memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_train.common.limits import CGROUPS, UNLIMITED, cgroup_folders, limit_of, number_in
from uccl_ep_train.core.native import host_nics
from uccl_ep_train.tools.doctor.findings import Facts, Finding, Group, Said, each, fine, fix, warning
from uccl_ep_train.tools.doctor.session import Here, Options

NAME = "limits"
MIB = 1 << 20
THREADS_OF_RANK = 64
"""Of torch, NCCL, gloo, a data loader and our proxy, about."""
FILES_OF_RANK = 512
FILES_OF_PEER = 16
"""Sockets of gloo, NCCL and libfabric to a peer, over the groups of a job, about."""
_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14


def look(here: Here) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "locked_bytes": UNLIMITED if may_lock_all() else limit_of(resource.RLIMIT_MEMLOCK),
        "files": limit_of(resource.RLIMIT_NOFILE),
        "processes": limit_of(resource.RLIMIT_NPROC),
        "cores": sorted(os.sched_getaffinity(0)),
        "proxies": 1 if here.config is None else here.config.network.num_proxies,
        "budget_bytes": 0 if here.config is None else here.config.memory.budget_bytes,
        "has_nic": bool(host_nics()),
    }
    return facts | cgroup_limits()


def may_lock_all(status: Path = _STATUS) -> bool:
    """Whether the limit of locked memory does not hold for this process (CAP_IPC_LOCK, as root has)."""
    try:
        for line in status.read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    except OSError:
        pass
    return False


def cgroup_limits(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> dict[str, Any]:
    """The tightest limits of this process's cgroup and those above it, of version 2 or 1; UNLIMITED: none.

    memory_left_bytes, tasks_left; quota: cores' worth of time.
    """
    left, tasks, quota = [], [], []
    for folder in cgroup_folders(root, own):
        memory = number_in(folder / "memory.max", folder / "memory.limit_in_bytes")
        if 0 <= memory < 1 << 60:  # version 1 says "no limit" by a number near 2^63
            used = number_in(folder / "memory.current", folder / "memory.usage_in_bytes")
            left.append(max(0, memory - max(0, used)))
        most = number_in(folder / "pids.max")
        if most >= 0:
            tasks.append(max(0, most - max(0, number_in(folder / "pids.current"))))
        quota += _quota(folder)
    return {
        "memory_left_bytes": min(left, default=UNLIMITED),
        "tasks_left": min(tasks, default=UNLIMITED),
        "quota": min(quota, default=float(UNLIMITED)),
    }


def _quota(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()[:2]
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError):
        return []


def judge(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    def of_rank(rank: int, seen: Facts) -> list[Said]:
        ranks = [peer for peer in group.neighbours(rank) if peer in facts]
        said = [
            *_locked(seen, group.spans_hosts),
            *_files(seen, group.size),
            *_threads(seen, len(ranks)),
            *_cores([facts[peer] for peer in ranks]),
        ]
        return said or [fine("locked memory, open files, threads and cores suffice")]

    return each(NAME, facts, of_rank)


def _locked(seen: Facts, spans_hosts: bool) -> list[Said]:
    limit = seen["locked_bytes"]
    if limit == UNLIMITED or limit >= 2 * seen["budget_bytes"] + 64 * MIB:
        return []
    text = f"locked memory is limited to {limit / MIB:.0f} MiB, and RDMA NICs lock what they read and write"
    remedy = (
        "ulimit -l unlimited (/etc/security/limits.conf); Slurm: PropagateResourceLimitsExcept=MEMLOCK and\n"
        "LimitMEMLOCK=infinity for slurmd; Docker: --ulimit memlock=-1; Kubernetes: capability IPC_LOCK"
    )
    if seen["has_nic"] and spans_hosts:
        return [fix(text, remedy)]
    return [warning(text, remedy)] if seen["has_nic"] else []


def _files(seen: Facts, size: int) -> list[Said]:
    need = FILES_OF_RANK + FILES_OF_PEER * size
    if seen["files"] == UNLIMITED or seen["files"] >= need:
        return []
    return [
        warning(
            f"a process may open {seen['files']} files; a job of {size} ranks takes up to {need} a "
            f"rank, about",
            f"ulimit -n {max(65536, need)} (/etc/security/limits.conf, LimitNOFILE, --ulimit nofile)",
        )
    ]


def _threads(seen: Facts, ranks_here: int) -> list[Said]:
    limits = {"cgroup (pids.max)": seen["tasks_left"], "ulimit -u": seen["processes"]}
    need = THREADS_OF_RANK * ranks_here
    return [
        warning(
            f"{which} leaves {left} threads; {ranks_here} ranks take about {need}",
            "raise it: ulimit -u; Docker: --pids-limit; Kubernetes: podPidsLimit; systemd: TasksMax",
        )
        for which, left in limits.items()
        if left != UNLIMITED and left < need
    ]


def _cores(seen: list[Facts]) -> list[Said]:
    """seen: of all ranks of the host"""
    cores = len({core for facts in seen for core in facts["cores"]})
    quotas = [facts["quota"] for facts in seen if facts["quota"] != UNLIMITED]
    if quotas:
        cores = min(cores, int(min(quotas)))
    need = sum(1 + facts["proxies"] for facts in seen)
    if cores >= need:
        return []
    return [
        warning(
            f"{len(seen)} ranks share {cores} cores; each keeps a thread of its own and its proxy busy: "
            f"{need} in all",
            "give a rank at least 2 cores, better 8: Slurm --cpus-per-task, Kubernetes "
            "resources.limits.cpu, and no\n"
            "binding of a rank to one core (--cpu-bind=none, or torchrun's ranks inherit it)",
        )
    ]
