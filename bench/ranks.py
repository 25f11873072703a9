"""The ranks of a measuring program: started by torchrun, or here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipes.launch import run_ranks
from recipes.plan import devices
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.settings import env


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Adds --share-gpus and parses the arguments. --share-gpus without a GPU is an error."""
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="ours only, on fewer GPUs than ranks, which run at once on them: start NVIDIA's MPS first",
    )
    args = parser.parse_args(argv)
    if args.share_gpus and torch.cuda.device_count() == 0:  # does not initialise CUDA
        parser.error("--share-gpus: torch sees no GPU")
    return args


def start_ranks(num_ranks: int, program: Path, argv: list[str]) -> int:
    """Runs `program` on `num_ranks` ranks of this host, and returns its exit status."""
    # gloo looks up an address by the host's name, which not every machine resolves.
    env.set_default("GLOO_SOCKET_IFNAME", "lo")
    return run_ranks(num_ranks, argv, program=(str(program.resolve()),))


def join_group(share_gpus: bool = False) -> None:
    """Makes this process a rank: its GPU if there are any, the default group, one thread, no gradients.

    share_gpus  a GPU may have several ranks, and the group has no NCCL, which would hang under MPS
    """
    torch.set_num_threads(1)  # the ranks share the host's cores
    torch.set_grad_enabled(False)
    local_rank = int(env.read("LOCAL_RANK", "0"))
    if share_gpus and torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        dist.init_process_group("gloo")
        return
    dist.init_process_group(devices.join("cuda" if torch.cuda.is_available() else "cpu", local_rank))


def lacks_nccl() -> bool:
    """Whether there are GPUs but the group has no NCCL, because ranks share the GPUs."""
    return torch.cuda.is_available() and "nccl" not in dist.get_backend_config()


def ranks_of_gpu() -> int:
    """The most ranks that share a GPU of this host, which has at least one."""
    return -(-int(env.read("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())


def too_many_sms(config: EpConfig) -> str:
    """Why ranks that share a GPU cannot use buffers of this config, or "".

    Their kernels wait for each other, so all of them must fit on the GPU at once.
    """
    if not lacks_nccl():
        return ""
    ranks = ranks_of_gpu()
    sms = max(config.gpu.num_sms, config.gpu.stage_sms or 0) * ranks
    most = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return f"not with --share-gpus: {ranks} ranks take {sms} SMs of {most}" if sms > most else ""


class Meeting:
    """A barrier of the GPUs on the caller's stream. The caller itself does not wait.

    No GPU leaves a call before all GPUs have reached it. This class uses an all-reduce of NCCL;
    `DispatchMeeting` works without NCCL.
    """

    def __call__(self) -> None:
        """Collective."""
        dist.all_reduce(torch.zeros(1, device="cuda"))

    def close(self) -> None:
        """Collective."""


class DispatchMeeting(Meeting):
    """Uses a dispatch with a known plan, of one row to each rank of one host."""

    def __init__(self) -> None:
        """Collective."""
        ranks = dist.get_world_size()
        config: dict[str, Any] = {"num_experts": ranks, "hidden": 128, "domain_size": ranks, "num_sms": 2}
        self._buffer = Buffer(None, EpConfig(**config, dispatch_dtype="bf16", budget_bytes=64 << 20))
        self._row = torch.ones(1, 128, dtype=torch.bfloat16, device=self._buffer.device)
        everybody = torch.arange(ranks, device=self._buffer.device).reshape(1, ranks)
        self._plan = self._buffer.dispatch(self._row, everybody).handle

    def __call__(self) -> None:
        self._buffer.dispatch(self._row, handle=self._plan)

    def close(self) -> None:
        self._buffer.close()


def meeting() -> Meeting:
    """Collective."""
    return DispatchMeeting() if lacks_nccl() else Meeting()
