"""A measuring program's ranks: torchrun's, or started here."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from recipes import devices
from recipes.launch import run_ranks
from uccl_ep_train import env


def start_ranks(num_ranks: int, program: Path, argv: list[str]) -> int:
    """`program` on so many ranks of this host; its exit status."""
    # gloo looks for an address by the host's name, which not every machine resolves.
    env.set_default("GLOO_SOCKET_IFNAME", "lo")
    return run_ranks(num_ranks, argv, program=(str(program.resolve()),))


def join_group() -> None:
    """This process as a rank: its GPU if there are any, the default group, one thread, no gradients."""
    torch.set_num_threads(1)  # the ranks share the host's cores
    torch.set_grad_enabled(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group(devices.join(device, int(env.read("LOCAL_RANK", "0"))))
