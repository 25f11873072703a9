"""Creation of a buffer fails on all ranks or on none, at once, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.by_hand import SETTINGS, close, create, shared_memory
from uccl_ep_train import Buffer, EpConfig, memory_plan
from uccl_ep_train.errors import (
    ConfigError,
    DtypeError,
    MemoryBudgetError,
    NativeMissingError,
    PeerFailed,
    RankMismatchError,
)
from uccl_ep_train.group import lifecycle


def test_the_configuration_must_be_one() -> None:
    with pytest.raises(DtypeError, match="EpConfig"):
        Buffer(None, {"num_experts": 8})  # type: ignore[arg-type]


def test_a_value_that_does_not_fit_the_group_fails_on_every_rank() -> None:
    for result in create(3):
        assert isinstance(result, ConfigError)
        assert "num_experts = 8" in str(result) and "number of ranks, 3" in str(result)


def test_ranks_with_other_settings_are_told_both_values() -> None:
    for result in create(2, {}, {"hidden": 256}):
        assert isinstance(result, RankMismatchError)
        assert "rank 0 has hidden = 128, rank 1 has hidden = 256" in str(result)


def test_a_gpu_that_only_one_rank_has_fails_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default comes to another backend on one rank; CUDA is asked for and one rank has no GPU."""
    chosen = iter([torch.device("cpu"), torch.device("cuda", 0)])
    monkeypatch.setattr(lifecycle.cuda, "choose_device", lambda config: next(chosen))
    for result in create(2, backend="auto"):
        assert isinstance(result, RankMismatchError) and "has backend = " in str(result)
        assert "'host'" in str(result) and "'cuda'" in str(result)
    monkeypatch.undo()
    started = time.monotonic()
    results = create(2, {"backend": "host"}, {"backend": "cuda"})
    if not torch.cuda.is_available():
        assert isinstance(results[1], ConfigError) and "torch sees no GPU" in str(results[1])
        assert isinstance(results[0], PeerFailed) and "rank 1 failed with ConfigError" in str(results[0])
    assert time.monotonic() - started < 10, "the others waited for the arrival deadline"


def test_a_budget_that_is_too_small_names_the_least_one() -> None:
    least = memory_plan(EpConfig(**SETTINGS), 2).least_budget_bytes
    for result in create(2, budget_bytes=least - 1):
        assert isinstance(result, MemoryBudgetError) and str(least) in str(result)
    close(create(2, budget_bytes=least))


def test_without_the_extension_the_error_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uccl_ep_train._native", None)
    for result in create(2):
        assert isinstance(result, NativeMissingError) and "pip install" in str(result)


class FaultyCore:
    """The native module with an engine of which one method fails on rank 1."""

    def __init__(self, core: Any, method: str) -> None:
        self._core = core
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def HostEngine(self, config: Any) -> Any:
        engine = self._core.HostEngine(config)
        return _FaultyEngine(engine, self._method) if config.rank == 1 else engine


def _no_memory(*_: Any) -> None:
    raise MemoryError("injected")


class _FaultyEngine:
    def __init__(self, engine: Any, method: str) -> None:
        self._engine = engine
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return _no_memory if name == self._method else getattr(self._engine, name)


@pytest.mark.parametrize("method", ["export_handle", "connect", "start"])
@pytest.mark.parametrize("domain_size", [1, 2])
def test_a_failure_at_any_step_fails_all_at_once_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, method: str, domain_size: int
) -> None:
    core = lifecycle.load_native()
    monkeypatch.setattr(lifecycle, "load_native", lambda: FaultyCore(core, method))
    started = time.monotonic()
    results = create(2, domain_size=domain_size)
    assert time.monotonic() - started < 20  # Not the 30 s that a missing rank takes.
    assert isinstance(results[0], PeerFailed) and "rank 1 failed with MemoryError" in str(results[0])
    assert isinstance(results[1], MemoryError)
    assert shared_memory(os.getpid()) == set()


def test_memory_that_is_left_is_seen() -> None:
    """Negative control."""
    left = Path(f"/dev/shm/uccl_ep.{os.getpid()}.left")
    left.touch()
    try:
        assert shared_memory(os.getpid()) == {left.name}
    finally:
        left.unlink()
