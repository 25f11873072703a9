"""Ranks shared by all Megatron tests; skipped where Megatron-Core is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.megatron.harness import MegatronRanks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/megatron/" in item.path.as_posix():
            item.add_marker(pytest.mark.megatron)


@pytest.fixture(scope="package")
def ranks() -> Iterator[MegatronRanks]:
    """Four ranks with Megatron-Core."""
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("importing megatron.core failed: megatron-core is not installed")
    group = MegatronRanks()
    yield group
    group.close()
