"""Block-FP8 experts of TransformerEngine see no difference between rows sent as FP8 and as BF16."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.machine import needs_gpus
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.group.bootstrap import LocalBootstrap

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
    ),
]

T, H, FFN, K, E = 512, 7168, 512, 8, 16
ALIGNMENT = 16  # rows, what block-FP8 products want


def received(fp8_scale: str) -> tuple[dict[str, Tensor], list[int]]:
    """Rows [R, H] of one dispatch of the same tokens by wire dtype, and the rows of each expert."""
    config = EpConfig(
        num_experts=E,
        hidden=H,
        backend="cuda",
        dispatch_dtype="bf16",
        fp8_scale=fp8_scale,
        budget_bytes=512 << 20,
    )
    generator = torch.Generator().manual_seed(0)
    # Rows of other magnitudes, as the hidden states of a model have them.
    x_TH = torch.randn(T, H, generator=generator) * torch.logspace(-3, 3, T)[:, None]
    idx_TK = torch.rand(T, E, generator=generator).topk(K).indices
    with Buffer(None, config, bootstrap=LocalBootstrap.create(1)[0]) as buffer:
        x_TH, idx_TK = x_TH.to(buffer.device, torch.bfloat16), idx_TK.to(buffer.device)
        results = {
            wire: buffer.dispatch(x_TH, idx_TK, expert_alignment=ALIGNMENT, dispatch_dtype=wire)
            for wire in ("bf16", "fp8")
        }
        torch.cuda.synchronize()
        buffer.check()
    counts = results["bf16"].tokens_per_expert.tolist()
    assert counts == results["fp8"].tokens_per_expert.tolist()
    assert all(count % ALIGNMENT == 0 for count in counts)
    assert not torch.equal(results["bf16"].rows, results["fp8"].rows), "nothing was rounded on the way"
    return {wire: result.rows.detach() for wire, result in results.items()}, counts


def block_values(rows_RH: Tensor) -> Tensor:
    """What a block-FP8 product multiplies: TransformerEngine's 1x128 quantisation, decoded."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    tex: Any = importlib.import_module("transformer_engine_torch")
    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1
    )
    return quantizer(rows_RH).dequantize(dtype=torch.float32)


def products(rows_RH: Tensor, counts: list[int]) -> Tensor:
    """[R, FFN]: TransformerEngine's grouped product of the experts with its block-FP8 recipe."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    torch.manual_seed(0)
    experts: Any = te.GroupedLinear(E, H, FFN, bias=False, params_dtype=torch.bfloat16, device=rows_RH.device)
    with te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
        return experts(rows_RH, counts)


def test_fp8_dispatch_changes_no_bit_of_what_the_experts_multiply() -> None:
    rows, counts = received("pow2")
    assert torch.equal(block_values(rows["fp8"]), block_values(rows["bf16"]))
    assert torch.equal(products(rows["fp8"], counts), products(rows["bf16"], counts))


def test_scales_that_are_no_powers_of_two_change_it() -> None:
    """Control: why power-of-two scales are the default."""
    rows, counts = received("fp32")
    assert not torch.equal(block_values(rows["fp8"]), block_values(rows["bf16"]))
    assert not torch.equal(products(rows["fp8"], counts), products(rows["bf16"], counts))
