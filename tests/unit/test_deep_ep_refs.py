"""`deep_ep.utils.refs`, `.gate` and `.math`: what DeepEP's tests of its second interface import."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.process_ranks import Rank
from tests.unit.deep_ep_gpus import drawn_on_cpu, module_ranks
from uccl_ep_train import deep_ep
from uccl_ep_train.common.exponents import dense, unpack_exponents
from uccl_ep_train.deep_ep.utils import gate, math, refs

H, E, K, RANKS, MOST = 256, 8, 3, 2, 40


@drawn_on_cpu
def drawn(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, topk_idx, topk_weights, scales."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, H, generator=generator).to(torch.bfloat16)
    idx = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K].contiguous()
    idx[torch.rand(tokens, K, generator=generator) < 0.3] = -1
    weights = torch.rand(tokens, K, generator=generator)
    return x, idx, weights, torch.rand(tokens, H // 128, generator=generator)


def same_as_the_buffer(rank: Rank) -> list[bool]:
    """For bfloat16 and for codes; the last: a row that is not the reference's is found."""
    tokens = MOST - rank.rank
    x, idx, weights, scales = drawn(rank.rank, tokens)
    buffer: Any = deep_ep.ElasticBuffer(rank.group, num_max_tokens_per_rank=MOST)
    same: list[bool] = []
    rows: tuple[Any, ...] = ()
    for given in (x, (x.to(torch.float8_e4m3fn), scales)):
        wanted: Any = refs.dispatch(given, idx, weights, MOST, E)
        got = buffer.dispatch(given, topk_idx=idx, topk_weights=weights, num_experts=E)
        rows = got[0] if isinstance(got[0], tuple) else (got[0],)
        of_refs = wanted[0] if isinstance(wanted[0], tuple) else (wanted[0],)
        here = wanted[1] >= 0
        same += [torch.equal(a.float(), b.float()) for a, b in zip(rows, of_refs, strict=True)]
        same += [torch.equal(got[1], wanted[1]), torch.equal(got[2][here], wanted[2][here])]
        same += [torch.equal(got[3].recv_src_metadata[:, 0], wanted[3])]
        psums = got[3].psum_num_recv_tokens_per_scaleup_rank.cpu()  # as the counts of the reference
        same += [torch.equal(psums, wanted[4].cumsum(0).int())]
    sums = buffer.combine(torch.ones(len(rows[0]), H, dtype=torch.bfloat16), got[3], bias=x)[0]
    outputs = torch.zeros(tokens, K, H, dtype=torch.bfloat16)
    ranks = idx.div(E // RANKS, rounding_mode="floor")
    for column in range(K):  # a row for each rank that the token goes to
        first = (idx[:, column] >= 0) & ~(ranks[:, :column] == ranks[:, column : column + 1]).any(1)
        outputs[first, column] = 1
    same.append(torch.equal(sums, refs.combine(outputs, idx, 1, RANKS, E, x, True, False)))
    buffer.destroy()
    rows[0].view(torch.uint8)[0, 0] ^= 1
    return [*same, not torch.equal(rows[0].float(), of_refs[0].float())]


def test_the_references_are_what_the_buffer_gives() -> None:
    with module_ranks(RANKS, same_as_the_buffer) as ranks:
        for outcome in ranks.outcomes(timeout_s=110).values():
            assert not outcome.error, outcome.trace
            assert len(outcome.value) == 13 and all(outcome.value), outcome.value


@pytest.mark.parametrize(
    ("recipe", "total"), [((False, False), 258.0), ((True, False), 256.0), ((True, True), 256.0)]
)
def test_sums_are_rounded_where_the_reference_reduces(recipe: tuple[bool, bool], total: float) -> None:
    """256 + 1 on one rank is 256 in bfloat16; the third addend comes from the other rank."""
    y = torch.tensor([256.0, 1.0, 1.0]).view(1, 3, 1).to(torch.bfloat16)
    idx = torch.tensor([[0, 1, E - 1]])
    assert refs.combine(y, idx, 1, RANKS, E, None, *recipe).item() == total
    bias = (torch.full((1, 1), 64.0), torch.full((1, 1), -64.0))
    assert refs.combine(y, idx, 1, RANKS, E, bias, *recipe).item() == total


def test_made_up_outputs_are_the_same_for_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: RANKS)

    def made(tokens: list[int]) -> Tensor:
        return refs.generate_pre_combine_data(torch.tensor(tokens, dtype=torch.int32), MOST, K, H)

    some, others = made([3, 70]), made([70, 4])
    assert some.shape == (2, K, H) and torch.equal(some[1], others[0])
    assert len({row.sum().item() for row in torch.cat([some, others[1:]]).view(-1, H).float()}) == 3 * K


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
def test_rank_0_gets_the_ratio_that_was_asked_for(ratio: float, precise: bool) -> None:
    torch.manual_seed(3)
    scores = gate.get_unbalanced_scores(4096, 64, 8, 4, ratio, precise)
    tokens = gate.tokens_of_ranks(scores, 8, 4)
    assert scores.shape == (4096, 64)
    assert abs(tokens[0] / tokens[1:].mean() - ratio) < 0.05


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((5, 1), (1, 32)), ((1, 1), (7, 9)), ((5, 2), (1, 5)), ((1, 4), (9, 1)), ((0, 3), (3, 1))],
)
def test_scales_of_any_strides_are_read_as_bytes(shape: tuple[int, int], stride: tuple[int, int]) -> None:
    """torch calls a single column contiguous whatever its stride is, and then does not view it as bytes."""
    words = torch.arange(200, dtype=torch.int32).as_strided(shape, stride)
    wanted = torch.tensor(words.tolist(), dtype=torch.int32).reshape(shape)
    assert torch.equal(dense(words).view(torch.uint8), wanted.view(torch.uint8))
    if shape[0] > 0:
        codes = torch.ones(shape[0], 512 * shape[1]).to(torch.float8_e4m3fn)
        scales = unpack_exponents(words, 4 * shape[1])
        assert torch.equal(scales, (wanted.view(torch.uint8).int() << 23).view(torch.float32))
        assert torch.equal(math.per_token_cast_back(codes, words), math.per_token_cast_back(codes, wanted))


def test_a_dense_tensor_is_not_copied() -> None:
    """Control."""
    words = torch.arange(12).view(3, 4)
    assert dense(words) is words and dense(words.t()).data_ptr() != words.data_ptr()
