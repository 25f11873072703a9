"""Process groups and seeds, as DeepEP's tests make them."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from uccl_ep_train.settings import env

_local_rank = 0
_seeds = {"local": 0, "global": 0}


def init_seed(global_seed: int) -> None:
    _seeds.update({"global": global_seed, "local": global_seed + dist.get_rank()})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    return _seeds["local"]


def get_global_seed() -> int:
    return _seeds["global"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on every rank, or on the first one of each node; then all wait for each other."""
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()


_gather = dist.all_gather_into_tensor


def _gather_stacked(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
    """NCCL's takes outputs of any shape; gloo's wants inputs one after the other."""
    shape = (-1, *input_tensor.shape[1:])
    return _gather(output_tensor.view(shape), input_tensor, *args, **options)


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, ProcessGroup]:
    """Joins the group that MASTER_ADDR, MASTER_PORT, WORLD_SIZE (of nodes) and RANK (of this node) name.

    Ranks beyond the number of GPUs share them; the group is then gloo's, as NCCL wants a GPU for each rank.
    Without a GPU tensors are on the CPU. Returns (rank, number of ranks, group).
    """
    global _local_rank
    _local_rank = local_rank
    nodes, node = int(env.read("WORLD_SIZE", "1")), int(env.read("RANK", "0"))
    address, port = env.read("MASTER_ADDR", "127.0.0.1"), env.read("MASTER_PORT", "8361")
    num_gpus = torch.cuda.device_count()
    shares = num_gpus < num_local_ranks
    if shares:
        dist.all_gather_into_tensor = _gather_stacked
    dist.init_process_group(
        "gloo" if shares else "nccl",
        init_method=f"tcp://{address}:{port}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    if num_gpus > 0:
        torch.set_default_device("cuda")
        torch.cuda.set_device(local_rank % num_gpus)
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(dist.get_world_size())))
