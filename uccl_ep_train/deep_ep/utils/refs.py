"""What a dispatch and a combine of `ElasticBuffer` give, by torch.distributed and plain torch: for tests.

Shapes: T tokens, R ranks, H hidden, K experts per token, E experts, N received rows.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from uccl_ep_train.deep_ep.utils.envs import get_global_seed

Rows = Tensor | tuple[Tensor, Tensor]


def dispatch(
    x: Rows, topk_idx: Tensor, topk_weights: Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Rows, Tensor, Tensor, Tensor, Tensor]:
    """x [T, H], or codes and scales; topk_idx, topk_weights [T, K]. Collective, in the default group.

    Returns, by source rank, then token: rows, topk_idx [N, K] (numbers among this rank's experts, -1: another
    rank's), topk_weights [N, K], tokens [N] int32 (num_max_tokens_per_rank * rank + token); and [R] int32 on
    the CPU: tokens that came from each rank.
    """
    local, rank = num_experts // dist.get_world_size(), dist.get_rank()
    parts = x if isinstance(x, tuple) else (x,)
    # Codes travel as bytes: torch neither pickles nor concatenates them everywhere.
    plain = [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]
    told: list[tuple[Tensor, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(told, tuple(t.cpu() for t in (*plain, topk_idx, topk_weights)))
    found: list[tuple[Tensor, ...]] = []
    for source, given in enumerate(told):
        here = given[-2] - rank * local
        here = torch.where((here >= 0) & (here < local), here, -1)
        tokens = (here >= 0).any(1).nonzero().flatten()
        numbers = (source * num_max_tokens_per_rank + tokens).to(torch.int32)
        found.append((*(part[tokens] for part in given[:-2]), here[tokens], given[-1][tokens], numbers))
    counts = torch.tensor([len(of_source[-1]) for of_source in found], dtype=torch.int32, device="cpu")
    joined = [torch.cat(column).to(topk_idx.device) for column in zip(*found, strict=True)]
    first = joined[0].view(parts[0].dtype)
    rows = (first, joined[1]) if len(parts) == 2 else first
    return rows, joined[-3], joined[-2], joined[-1], counts


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """[N, K, H] bfloat16 from -1 to 1: outputs of experts that every rank makes up alike for a token and a
    column. They depend on the seed.
    """
    columns = torch.arange(num_topk, device=src_token_global_idx.device)
    pairs = src_token_global_idx.to(torch.int64)[:, None] * num_topk + columns
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    frequency = (1 + pairs * 7919 % most).to(torch.float32) / most
    places = torch.arange(1, hidden + 1, dtype=torch.float32, device=pairs.device)
    return torch.sin(frequency[:, :, None] * places + math.cos(get_global_seed())).to(torch.bfloat16)


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """The sum of data [N, K, H] over K, ascending, in fp32: [N, H] in the dtype of data.

    initial_value  [N, H] float32: the first addend
    """
    total = torch.zeros_like(data[:, 0], dtype=torch.float32) if initial_value is None else initial_value
    for column in range(data.shape[1]):
        total = total + data[:, column].to(torch.float32)
    return total.to(data.dtype)


def _reduced(y: Tensor, groups: Tensor) -> Tensor:
    """y [T, K, H] with the columns of each group (groups [T, K]) summed into the last of them, others 0."""
    num_topk = y.shape[1]
    same = groups[:, :, None] == groups[:, None, :]
    out = torch.zeros_like(y)
    for column in range(num_topk):
        is_last = ~same[:, column, column + 1 :].any(1)
        members = torch.where((same[:, column] & is_last[:, None])[:, :, None], y, 0)
        out[:, column] = ordered_accumulate(members)
    return out


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Tensor:
    """The sum over the columns of y [T, K, H], which are 0 where topk_idx [T, K] is -1: [T, H].

    bias               [T, H], one or two: the first addends
    reduce_in_local    the columns of each rank are added first, and the sum is rounded to the dtype of y
    reduce_in_scaleup  then those of each group of `num_scaleup_ranks` ranks, likewise
    """
    local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _reduced(y, topk_idx.div(local, rounding_mode="floor"))
    if reduce_in_scaleup:
        y = _reduced(y, topk_idx.div(local * num_scaleup_ranks, rounding_mode="floor"))
    biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
    first = None
    for addend in biases:
        first = addend.to(torch.float32) if first is None else first + addend.to(torch.float32)
    return ordered_accumulate(y, first)
