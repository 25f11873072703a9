"""Checks `environment` and `leftovers`: misleading variables, and shared memory of dead jobs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_train.errors import ConfigError
from uccl_ep_train.group import leftovers
from uccl_ep_train.settings import env, variables
from uccl_ep_train.settings.config import EpConfig
from uccl_ep_train.tools.doctor.findings import WARNING, Facts, Finding, Group, Said, each, fine, fix, warning
from uccl_ep_train.tools.doctor.session import Here, Options

ENVIRONMENT, LEFTOVERS = "environment", "leftovers"


def look(here: Here) -> dict[str, Any]:
    """Reads the configuration for the checks that follow."""
    facts: dict[str, Any] = {
        "remarks": [list(remark) for remark in variables.remarks()],
        "set": env.of_family(),
        "nccl_gid": env.read("NCCL_IB_GID_INDEX"),
        "refused": "",
        "gid": -1,
        "faults": [],
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            here.config = EpConfig.from_env(
                num_experts=_divisible(here.options.num_experts, len(here.group)), hidden=here.options.hidden
            )
    except ConfigError as error:
        return facts | {"refused": str(error)}
    facts["gid"] = here.config.network.ib_gid_index
    facts["faults"] = [name for name in facts["set"] if name.startswith("UCCL_EP_LOOP_")]
    return facts


def _divisible(experts: int, ranks: int) -> int:
    return -(-experts // ranks) * ranks


def judge(_: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    return each(ENVIRONMENT, facts, lambda _, seen: _of_rank(seen)) + _unequal(facts)


def _of_rank(seen: Facts) -> list[Said]:
    said = []
    if seen["refused"]:
        said.append(
            fix(seen["refused"], "`python -m uccl_ep_train.env` shows every setting and where it comes from")
        )
    for _, text in seen["remarks"]:
        said.append(warning(text, "unset it, or correct its name"))
    if seen["faults"]:
        said.append(
            warning(
                f"{', '.join(seen['faults'])}: what makes the loop transport slow or faulty is set",
                "these are for tests; unset them for a job",
            )
        )
    if seen["nccl_gid"] and seen["gid"] >= 0 and str(seen["gid"]) != seen["nccl_gid"]:
        said.append(
            warning(
                f"NCCL_IB_GID_INDEX is {seen['nccl_gid']}, ours is {seen['gid']}",
                "both name an entry of the same table and are usually equal: set UCCL_EP_IB_GID_INDEX "
                "to NCCL's",
            )
        )
    return said or [
        fine(f"{len(seen['set'])} UCCL_* variables are set" if seen["set"] else "no UCCL_* variable is set")
    ]


def _unequal(facts: Mapping[int, Facts]) -> list[Finding]:
    """Variables that a launcher has passed on to some hosts only. Those of NICs may differ."""
    names = {name for seen in facts.values() for name in seen["set"]}
    may_differ = {
        entry.name for entry in variables.VARIABLES if entry.setting and not entry.setting.spec.agree
    }
    found = []
    for name in sorted(names - may_differ):
        without = tuple(rank for rank, seen in sorted(facts.items()) if name not in seen["set"])
        if without:
            found.append(
                Finding(
                    ENVIRONMENT,
                    WARNING,
                    f"{name} is not set here, and is on the other ranks",
                    "let the launcher pass it on: sbatch --export=ALL, mpirun -x, env of the pod, "
                    "runtime_env of Ray",
                    without,
                )
            )
    return found


def look_for_leftovers(_: Here) -> dict[str, Any]:
    return {"stale": leftovers.find()}


def judge_leftovers(_: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    def of_rank(rank: int, seen: Facts) -> list[Said]:
        if not seen["stale"]:
            return [fine("no shared memory of a dead job")]
        names = [Path(path).name for path in seen["stale"]]
        shown = ", ".join(names[:2]) + (" and others" if len(names) > 2 else "")
        return [
            warning(
                f"{len(names)} segments in /dev/shm that no process uses: {shown}",
                "a job was killed while it made its buffers. The next buffer that is made here removes "
                "them; --json has all names",
            )
        ]

    return each(LEFTOVERS, facts, of_rank)
