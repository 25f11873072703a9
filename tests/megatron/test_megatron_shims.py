"""The CPU shims: absent with a GPU, and faithful without one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tests.megatron.harness import MegatronRanks
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.megatron import cpu_shims


def test_with_a_gpu_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_shims, "_installed", [])
    before = torch.cuda.current_device
    assert cpu_shims.install() == []
    assert torch.cuda.current_device is before


def test_every_shim_is_installed_once(ranks: MegatronRanks) -> None:
    for names in ranks.run("shim_case.installed"):
        assert len(names) == len(set(names)) == (len(cpu_shims.ALL) if ranks.device == "cpu" else 0)


def test_bf16_products_are_fp32_products_rounded_once(ranks: MegatronRanks) -> None:
    """mm, addmm, bmm and baddbmm, forward and backward; FP32 products are untouched."""
    if ranks.device != "cpu":
        pytest.skip("the ranks have GPUs, and no shims")
    for differences in ranks.run("shim_case.products"):
        assert differences == {}


STASH = "megatron.core.transformer.moe.ops.paged_stash"


def test_without_triton_its_kernels_are_imported_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setitem(sys.modules, STASH, None)
    has_triton = "triton" in sys.modules
    cpu_shims._triton_kernels()
    kernels = importlib.import_module(STASH)
    with pytest.raises(ConfigError, match="paged_stash_copy_kernel needs Triton"):
        kernels.paged_stash_copy_kernel[1, 1](None)
    with pytest.raises(ConfigError, match="paged_stash_pop_kernel needs Triton"):
        kernels.paged_stash_pop_kernel()
    assert not hasattr(kernels, "__path__") and ("triton" in sys.modules) == has_triton


def test_without_a_gpu_transformer_engine_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = "transformer_engine"
    (tmp_path / f"{package}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in (package, "apex"):
        monkeypatch.setitem(sys.modules, name, sys)  # what it was is put back afterwards
        del sys.modules[name]
    assert importlib.util.find_spec(package) is not None, "the test proves nothing"
    cpu_shims._gpu_packages()
    with pytest.raises(ImportError):
        importlib.import_module(package)
    assert importlib.util.find_spec(package) is None


def test_with_triton_its_kernels_are_megatrons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setitem(sys.modules, STASH, None)
    cpu_shims._triton_kernels()
    assert sys.modules[STASH] is None
