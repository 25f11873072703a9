"""The torch operators on two GPUs: a compiled layer has the bits of an eager one, and no graph break."""

from __future__ import annotations

import pytest

from tests.machine import needs_gpus
from tests.process_ranks import ProcessRanks
from tests.unit.test_operators import compare

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(2),
]


@pytest.mark.parametrize(
    ("backend", "dispatch_dtype", "domain_size"),
    [("aot_eager", "bf16", 2), ("aot_eager", "fp8", 1), ("inductor", "bf16", 1), ("inductor", "bf16", 2)],
)
def test_a_compiled_layer_has_no_graph_break_and_the_bits_of_an_eager_one(
    backend: str, dispatch_dtype: str, domain_size: int
) -> None:
    with ProcessRanks(2, compare, (backend, dispatch_dtype, domain_size, "cuda")) as ranks:
        for outcome in ranks.outcomes(timeout_s=110).values():
            assert not outcome.error, outcome.trace
            assert outcome.value == 0, "plans outlive their tickets"
