"""Ranks shared by all Megatron tests; skipped where Megatron-Core is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron.harness import MegatronRanks, megatron_is_installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/megatron/" in item.path.as_posix():
            item.add_marker(pytest.mark.megatron)


@pytest.fixture(scope="package")
def ranks() -> Iterator[MegatronRanks]:
    """Four ranks with Megatron-Core."""
    if not megatron_is_installed():
        pytest.skip("no module megatron.core: megatron-core is not installed")
    group = MegatronRanks()
    yield group
    group.close()
