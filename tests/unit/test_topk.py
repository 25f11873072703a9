"""What a top-k routing says of ranks and experts, and metadata, is what loops say.

On CPUs torch says it. With `--backend cuda` kernels do, of which `topk_claims.cc` has claims.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from uccl_ep_train.core import topk

NONE = -1


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", 0) if request.config.getoption("--backend") == "cuda" else torch.device("cpu")


def drawn(tokens: int, width: int, experts: int, device: torch.device, strange: bool = False) -> Tensor:
    draw = torch.Generator().manual_seed(tokens + width + experts)
    routing = torch.randint(-1, experts, (tokens, width), generator=draw)
    if strange:
        routing[::3] = torch.randint(-(2**62), 2**62, routing[::3].shape, generator=draw)
    return routing.to(device)


@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("width", [0, 1, 8, 33])
@pytest.mark.parametrize(("ranks", "of_rank", "of_node"), [(1, 4, 0), (8, 32, 0), (16, 2, 8), (2048, 6, 8)])
def test_a_token_counts_once(
    device: torch.device, tokens: int, width: int, ranks: int, of_rank: int, of_node: int
) -> None:
    experts = ranks * of_rank
    routing = drawn(tokens, width, experts, device)
    found = topk.layout_of(routing, experts, ranks, of_node)
    named = [{expert for expert in row if expert != NONE} for row in routing.tolist()]
    per_rank, per_expert = [0] * ranks, [0] * experts
    per_node = [0] * (ranks // of_node if of_node else 0)
    for token, wanted in enumerate(named):
        to = {expert // of_rank for expert in wanted}
        assert set(found.in_rank[token].nonzero().flatten().tolist()) == to
        for expert in wanted:
            per_expert[expert] += 1
        for rank in to:
            per_rank[rank] += 1
        for node in {rank // of_node for rank in to} if of_node else ():
            per_node[node] += 1
    assert found.per_rank.tolist() == per_rank and found.per_expert.tolist() == per_expert
    assert (found.per_node is None) == (of_node == 0)
    assert found.per_node is None or found.per_node.tolist() == per_node
    assert {found.per_rank.dtype, found.per_expert.dtype} == {torch.int32}
    assert found.in_rank.dtype == torch.bool and found.in_rank.shape == (tokens, ranks)


def test_what_is_no_expert_counts_in_the_same_place_on_every_device(device: torch.device) -> None:
    routing = drawn(200, 8, 32, device, strange=True)
    found, wanted = topk.layout_of(routing, 32, 4), topk.layout_of(routing.cpu(), 32, 4)
    assert found.per_node is None and wanted.per_node is None
    for its, theirs in zip((found[0], *found[2:]), (wanted[0], *wanted[2:]), strict=True):
        assert torch.equal(its.cpu(), theirs)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("width", [1, 7, 8])
def test_metadata_holds_where_a_row_came_from_and_what_is_this_ranks(
    device: torch.device, tokens: int, width: int, has_weights: bool
) -> None:
    rank, of_rank = 3, 8
    routing = drawn(tokens, width, 5 * of_rank, device, strange=True)
    weights = torch.rand(tokens, width).to(device)
    words = topk.pack(device, tokens, rank, routing, weights if has_weights else None)
    assert words.shape == (tokens, topk.num_words(width, has_weights)) and words.dtype == torch.int32
    assert words[:, 0].tolist() == [rank + 1] * tokens and words[:, 1].tolist() == list(range(tokens))
    assert torch.equal(words.view(torch.int64)[:, 1 : 1 + width], routing + 1)
    experts, found = topk.unpack(words, width, has_weights, rank * of_rank, of_rank)
    is_local = (routing >= rank * of_rank) & (routing < (rank + 1) * of_rank)
    assert torch.equal(experts, torch.where(is_local, routing - rank * of_rank, NONE))
    assert is_local.any() or tokens < 300  # a control: some are
    assert (found is None) == (not has_weights)
    assert found is None or torch.equal(found, torch.where(is_local, weights, 0.0))
    # Experts alone, though weights travelled.
    alone, nothing = topk.unpack(words, width, False, rank * of_rank, of_rank)
    assert nothing is None and torch.equal(alone, experts)


def test_metadata_without_experts_says_where_a_row_came_from(device: torch.device) -> None:
    words = topk.pack(device, 3, 1, None, None)
    assert words.tolist() == [[2, 0], [2, 1], [2, 2]]


def test_a_row_of_zeros_names_no_expert(device: torch.device) -> None:
    words = torch.zeros(2, topk.num_words(3, True), dtype=torch.int32, device=device)
    experts, weights = topk.unpack(words, 3, True, 0, 4)
    assert weights is not None
    assert experts.tolist() == [[NONE] * 3] * 2 and weights.tolist() == [[0.0] * 3] * 2
