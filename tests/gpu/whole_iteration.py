"""Megatron's whole-iteration graphs, by ranks that share one GPU; a program for torchrun.

    torchrun --nproc_per_node=2 tests/gpu/whole_iteration.py

NCCL refuses ranks that share a GPU, so gradients go over gloo, outside the graph. `test_megatron_graphs.py`
has the same cases with a GPU for each rank.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

ALONE = dist.all_reduce


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """As torch's, but nothing for a group of one rank: gloo's cannot be captured."""
    if group is not None and group.size() == 1:
        return None
    return ALONE(tensor, op, group, async_op)


def sum_gradients(chunks: list[Any]) -> None:
    """Mean over the ranks of each group, which Megatron takes with a call that gloo lacks for GPUs."""
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            if group.size() > 1:
                there = buffer.grad_data.cpu()
                ALONE(there, group=group)
                buffer.grad_data.copy_(there / group.size())


def main() -> None:
    rank = int(os.environ["RANK"])
    os.environ.update(UCCL_EP_BACKEND="cuda", TORCHDYNAMO_DISABLE="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    from uccl_ep_train.errors import ConfigError
    from uccl_ep_train.megatron import cpu_shims

    cpu_shims.install()
    cpu_shims.install_for_local_spec()
    from tests.megatron import graph_case, training_case

    dist.init_process_group("gloo")
    dist.all_reduce = all_reduce
    training_case.finalize_model_grads = sum_gradients
    for domain_size in (dist.get_world_size(), 1):
        plain = graph_case.train_whole(rank, graphed=False, domain_size=domain_size)
        graphed = graph_case.train_whole(rank, graphed=True, domain_size=domain_size)
        assert (plain[2], graphed[2]) == (0, 1), "which of the two was captured"
        assert graphed[:2] == plain[:2], f"rank {rank}, domains of {domain_size}: {graphed} and {plain}"
        print(
            f"rank {rank}, domains of {domain_size}: last loss {plain[0][-1]:.4f}",
            flush=True,
        )
    dropless = graph_case.train_whole(rank, graphed=False, padded=False)
    assert dropless[:2] != plain[:2], "nothing was dropped"
    try:
        graph_case.train_whole(rank, graphed=True, padded=False)
    except ConfigError as error:
        print(f"rank {rank}, without padding: {type(error).__name__}: {error}", flush=True)
    else:
        raise AssertionError("counts that only the host can read were captured")


if __name__ == "__main__":
    main()
