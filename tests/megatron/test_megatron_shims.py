"""The CPU shims: absent with a GPU, and faithful without one."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.harness import MegatronRanks
from uccl_ep_train.megatron import cpu_shims


def test_with_a_gpu_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_shims, "_installed", [])
    before = torch.cuda.current_device
    assert cpu_shims.install() == []
    assert torch.cuda.current_device is before


def test_every_shim_is_installed_once(ranks: MegatronRanks) -> None:
    for names in ranks.run("shim_case.installed"):
        assert len(names) == len(set(names)) == len(cpu_shims.ALL)


def test_bf16_products_are_fp32_products_rounded_once(ranks: MegatronRanks) -> None:
    """mm, addmm, bmm and baddbmm, forward and backward; FP32 products are untouched."""
    for differences in ranks.run("shim_case.products"):
        assert differences == {}
