"""A measuring program's ranks: torchrun's, or started here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from uccl_ep_train import env


def start_ranks(num_ranks: int, program: Path, argv: list[str]) -> int:
    """`program` on so many ranks of this host, under torchrun's agent; its exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # gloo looks for an address by the host's name, which not every machine resolves.
    env.set_default("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, run_id="bench", monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(str(program.resolve()), *argv)
    except ChildFailedError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    return 0


def join_group() -> None:
    """This process as a rank: its GPU if there are any, the default group, one thread, no gradients."""
    torch.set_num_threads(1)  # the ranks share the host's cores
    torch.set_grad_enabled(False)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(env.read("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
