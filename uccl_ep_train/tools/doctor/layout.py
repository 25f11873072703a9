"""Check `layout`: the identity of this process, its GPU, and whether another process takes the same GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uccl_ep_train.core import cuda
from uccl_ep_train.settings import env
from uccl_ep_train.tools.doctor.findings import FIX, OK, WARNING, Facts, Finding, Group
from uccl_ep_train.tools.doctor.session import Here, Options

NAME = "layout"
_ONE_EACH = (
    "each rank needs a GPU of its own. torchrun sets LOCAL_RANK to 0, 1, ...; where a scheduler starts "
    "the ranks itself\n"
    "(Ray: LOCAL_RANK is 0 everywhere) let it show each rank one GPU by CUDA_VISIBLE_DEVICES, or set "
    "LOCAL_RANK:\n"
    "scripts/ray has both"
)
_TURNS = "NCCL_MULTI_RANK_GPU_ENABLE allows that from NCCL 2.30 on. They take turns: for a try, not for speed"


def look(here: Here) -> dict[str, Any]:
    """Chooses the GPU, too, as training does: for the checks that follow."""
    import torch

    me = here.me
    count = torch.cuda.device_count()
    facts: dict[str, Any] = {
        "launcher": me.launcher,
        "local_rank": me.local_rank,
        "visible": env.read("CUDA_VISIBLE_DEVICES"),
        "num_gpus": count,
        "may_share": cuda.ranks_may_share(),
        "gpu": -1,
        "gpu_id": "",
    }
    if count:
        here.gpu = me.local_rank % count
        properties = torch.cuda.get_device_properties(here.gpu)
        facts["gpu"] = here.gpu
        facts["gpu_id"] = str(getattr(properties, "uuid", ""))
    return facts


def judge(group: Group, facts: Mapping[int, Facts], options: Options) -> list[Finding]:
    found = _shared_gpus(group, facts)
    taken: dict[tuple[str, int], list[int]] = {}
    for rank, seen in facts.items():
        taken.setdefault((group.places[rank].memory, seen["local_rank"]), []).append(rank)
        if seen["num_gpus"] > 1 and seen["local_rank"] >= seen["num_gpus"] and not seen["may_share"]:
            found.append(
                Finding(
                    NAME,
                    FIX,
                    f"LOCAL_RANK is {seen['local_rank']} and there are {seen['num_gpus']} GPUs",
                    "start as many ranks on a host as it has GPUs, or show each rank its own by "
                    "CUDA_VISIBLE_DEVICES",
                    (rank,),
                )
            )
    doubles = {key: ranks for key, ranks in taken.items() if len(ranks) > 1}
    if doubles and not found and not all(seen["num_gpus"] == 1 for seen in facts.values()):
        ranks = tuple(sorted(rank for group_of in doubles.values() for rank in group_of))
        (_, local_rank), first = next(iter(doubles.items()))
        found.append(
            Finding(
                NAME,
                WARNING,
                f"LOCAL_RANK is {local_rank} on ranks {', '.join(map(str, first))} of one host: "
                "what goes by it, as Megatron does, takes them for one",
                "let the launcher set LOCAL_RANK to 0, 1, ... on each host; scripts/ray sets it for "
                "Ray's actors",
                ranks,
            )
        )
    return found or [Finding(NAME, OK, _summary(group, facts))]


def _shared_gpus(group: Group, facts: Mapping[int, Facts]) -> list[Finding]:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, seen in facts.items():
        if seen["gpu"] >= 0:
            # Where torch does not tell the device's own id, its number counts inside what a rank is shown.
            gpu = seen["gpu_id"] or f"{seen['visible']}:{seen['gpu']}"
            users.setdefault((group.places[rank].host, gpu), []).append(rank)
    allowed = all(seen["may_share"] for seen in facts.values())
    return [
        Finding(
            NAME,
            WARNING if allowed else FIX,
            f"they use one GPU, {gpu} (LOCAL_RANK "
            f"{', '.join(str(facts[rank]['local_rank']) for rank in ranks)}; "
            f"CUDA_VISIBLE_DEVICES {facts[ranks[0]]['visible'] or 'is not set'})",
            _TURNS if allowed else _ONE_EACH,
            tuple(ranks),
        )
        for (_, gpu), ranks in users.items()
        if len(ranks) > 1
    ]


def _summary(group: Group, facts: Mapping[int, Facts]) -> str:
    launcher = next(iter(facts.values()))["launcher"]
    by = {"none": "one process, no launcher", "environment": "ranks by RANK and WORLD_SIZE"}.get(
        launcher, f"ranks by {launcher}"
    )
    hosts: dict[str, int] = {}
    for rank in facts:
        hosts[group.places[rank].host] = hosts.get(group.places[rank].host, 0) + 1
    counts = sorted(set(hosts.values()))
    each_host = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    gpus = "a GPU each" if all(seen["gpu"] >= 0 for seen in facts.values()) else "tensors in CPU memory"
    if any(seen["gpu"] >= 0 for seen in facts.values()) and gpus != "a GPU each":
        gpus = "some with a GPU and some without"
    return f"{by}; {each_host} on a host, {gpus}"
