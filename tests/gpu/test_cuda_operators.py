"""The torch operators on two GPUs: a compiled layer has the bits of an eager one, and no graph break."""

from __future__ import annotations

import pytest
import torch

from tests.process_ranks import ProcessRanks
from tests.unit.test_operators import compare
from uccl_ep_train.core import cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or not cuda.built(), reason="needs two GPUs and CUDA kernels"
    ),
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
