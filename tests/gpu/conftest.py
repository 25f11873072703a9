"""What the tests of several domains on GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.domain_ranks import DomainRanks


@pytest.fixture(scope="module")
def domain_ranks() -> Iterator[DomainRanks]:
    ranks = DomainRanks()
    yield ranks
    ranks.close()
