"""What docs/training_notes.md says and no other test shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import RankGroup
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import ConfigError, DtypeError, InputError, RankMismatchError
from uccl_ep_train.megatron.buffers import BufferPool

H, E, K, T = 256, 4, 2, 6


def idx_of(rank: int, num_tokens: int = T) -> Tensor:
    return (torch.arange(num_tokens * K).reshape(num_tokens, K) + rank) % E


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_one_nan_or_inf_makes_its_block_nan_on_the_fp8_wire_only(wire: str, bad: float) -> None:
    def step(rank: int, buffer: Buffer) -> Tensor:
        x = torch.ones(T, H, dtype=torch.bfloat16)
        x[2, 5] = bad
        got = buffer.dispatch(x, idx_of(rank), dispatch_dtype=wire)
        return buffer.combine(got.rows, got.handle)

    wanted = torch.full((T, H), 2.0, dtype=torch.bfloat16)
    if wire == "fp8":
        wanted[2, :128] = torch.nan
    else:
        wanted[2, 5] = bad
    with RankGroup(2, {"num_experts": E, "hidden": H}) as group:
        for out in group.run(step):
            assert torch.allclose(out, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_default_wire_quantises_bf16_rows() -> None:
    def step(rank: int, buffer: Buffer) -> list[bool]:
        x = torch.linspace(1, 2, T * H).reshape(T, H).bfloat16()
        choices: tuple[dict[str, Any], ...] = ({}, {"dispatch_dtype": "fp8"}, {"dispatch_dtype": "bf16"})
        results = [buffer.dispatch(x, idx_of(rank), **options) for options in choices]
        got = [buffer.combine(result.rows, result.handle) for result in results]
        assert torch.equal(got[2], 2 * x)
        return [torch.equal(got[0], entry) for entry in got[1:]]

    with RankGroup(2, {"num_experts": E, "hidden": H}) as group:
        assert group.run(step) == [[True, False]] * 2


def test_fp16_is_refused_by_combine_too() -> None:
    def step(rank: int, buffer: Buffer) -> None:
        got = buffer.dispatch(torch.ones(T, H, dtype=torch.bfloat16), idx_of(rank))
        with pytest.raises(DtypeError, match="rows is float16; allowed is bfloat16 or float32"):
            buffer.combine(got.rows.half(), got.handle)

    with RankGroup(2, {"num_experts": E, "hidden": H}) as group:
        group.run(step)


def test_fp16_is_refused_for_a_megatron_model() -> None:
    model: Any = SimpleNamespace(params_dtype=torch.float16, hidden_size=H, num_moe_experts=E)
    with pytest.raises(ConfigError, match=r"params_dtype = torch\.float16"):
        BufferPool({}).ep_config(model, tp_size=1, ep_size=2)


def test_a_model_that_megatron_converts_has_the_dtype_it_gets() -> None:
    """Parameters are float32 where a config says nothing of them; `Float16Module` makes them bfloat16."""
    made = {"params_dtype": torch.float32, "hidden_size": H, "num_moe_experts": E}
    config = BufferPool({}).ep_config(SimpleNamespace(**made, bf16=True), tp_size=1, ep_size=2)
    assert (config.dispatch_dtype, config.max_dtype) == ("fp8", "fp32")
    with pytest.raises(ConfigError, match="fp16 = True: the dispatcher carries"):
        BufferPool({}).ep_config(SimpleNamespace(**made, fp16=True), tp_size=1, ep_size=2)
    with pytest.raises(ConfigError, match="dispatch_dtype = 'fp8'"):
        BufferPool({}).ep_config(SimpleNamespace(**made, bf16=False), tp_size=1, ep_size=2)


def test_requires_grad_that_differs_is_a_mismatch() -> None:
    def step(rank: int, buffer: Buffer) -> None:
        x = torch.ones(T, H, dtype=torch.bfloat16, requires_grad=rank == 0)
        got = buffer.dispatch(x, idx_of(rank))
        if rank == 0:
            got.rows.sum().backward()
        buffer.dispatch(x.detach(), idx_of(rank))  # rank 1's is with rank 0's backward

    with RankGroup(2, {"num_experts": E, "hidden": H}) as group:
        for outcome in group.outcomes(step):
            assert isinstance(outcome.error, RankMismatchError), outcome


class Layer(torch.nn.Module):
    """A router that all ranks have alike, and an expert of this rank's own."""

    def __init__(self, rank: int, buffer: Buffer) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.router = torch.nn.Parameter(torch.randn(H, E, generator=generator))
        self.expert = torch.nn.Parameter(torch.randn(H, H, generator=generator) / 16 + rank)
        self.buffer = buffer

    def forward(self, x: Tensor) -> Tensor:
        probs, idx = torch.softmax(x @ self.router, dim=-1).topk(K)
        got = self.buffer.dispatch(x, idx, probs, dispatch_dtype="bf16")
        assert got.row_weights is not None
        y = (got.rows @ self.expert) * got.row_weights[:, None]
        return x + self.buffer.combine(y, got.handle)


def train_sharded(rank: Rank) -> None:
    from torch.distributed.fsdp import fully_shard

    config = EpConfig(num_experts=E, hidden=H, backend="host", budget_bytes=16 << 20, domain_size=1)
    with Buffer(rank.group, config) as buffer:
        plain, sharded = Layer(rank.rank, buffer), Layer(rank.rank, buffer)
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (2,)), ignored_params={sharded.expert})
        x = torch.randn(T + rank.rank, H, generator=torch.Generator().manual_seed(rank.rank))
        outputs = [model(x) for model in (plain, sharded)]
        for out in outputs:
            out.square().mean().backward()
        assert torch.equal(*outputs)
        found: Any = sharded.router.grad
        wanted = plain.router.grad
        assert plain.expert.grad is not None and sharded.expert.grad is not None and wanted is not None
        assert torch.equal(sharded.expert.grad, plain.expert.grad)
        dist.all_reduce(wanted)
        torch.testing.assert_close(found.full_tensor(), wanted / 2)
        with pytest.raises(InputError, match="x, a DTensor, has no memory of its own"):
            buffer.dispatch(sharded.router.detach().T.contiguous(), idx_of(0, E), dispatch_dtype="bf16")
        assert set(sharded.state_dict()) == {"router", "expert"}


def test_fsdp_shards_what_is_replicated() -> None:
    with ProcessRanks(2, train_sharded) as ranks:
        ranks.results()
