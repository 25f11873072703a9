"""Megatron's CUDA graphs of the router and of what our dispatcher does before it dispatches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from recipes.plan import devices
from tests.megatron.harness import CaseError, MegatronRanks, megatron_is_installed
from uccl_ep_train.core import cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not cuda.built(), reason="no GPU, or built without CUDA kernels"
    ),
    pytest.mark.skipif(
        not megatron_is_installed() or importlib.util.find_spec("transformer_engine") is None,
        reason="Megatron-Core or TransformerEngine is not installed",
    ),
]

ROUTER, PREPROCESS, WHOLE_LAYER = ["moe_router"], ["moe_router", "moe_preprocess"], ["moe"]
STEPS_WITH, MICROBATCHES, LAYERS = 4, 2, 2


@pytest.fixture(scope="module")
def gpus() -> Iterator[MegatronRanks]:
    """Four ranks, or as many as there are GPUs."""
    group = MegatronRanks(min(4, torch.cuda.device_count()) if devices.lacking(4) else 4)
    yield group
    group.close()


@pytest.mark.parametrize("modules", [ROUTER, PREPROCESS], ids=["router", "router and preprocess"])
def test_a_captured_router_trains_bit_for_bit_like_one_that_is_not(
    gpus: MegatronRanks, modules: list[str]
) -> None:
    plain = gpus.run("graph_case.train", dispatcher="uccl_ep", modules=[])
    graphed = gpus.run("graph_case.train", dispatcher="uccl_ep", modules=modules)
    assert [found[2] for found in plain] == [0] * gpus.num_ranks
    assert [found[2] for found in graphed] == [STEPS_WITH * MICROBATCHES * LAYERS] * gpus.num_ranks
    assert [found[:2] for found in graphed] == [found[:2] for found in plain]


def test_a_captured_moe_layer_trains_bit_for_bit_like_one_that_is_not(gpus: MegatronRanks) -> None:
    """Dispatch, experts and combine, forward and backward; Megatron wants each expert to get alike."""
    plain = gpus.run("graph_case.train", dispatcher="uccl_ep", modules=[], padded=True)
    graphed = gpus.run("graph_case.train", dispatcher="uccl_ep", modules=WHOLE_LAYER, padded=True)
    dropless = gpus.run("graph_case.train", dispatcher="uccl_ep", modules=[])
    assert [found[2] for found in graphed] == [STEPS_WITH * MICROBATCHES * LAYERS] * gpus.num_ranks
    assert [found[:2] for found in graphed] == [found[:2] for found in plain]
    assert [found[0] for found in plain] != [found[0] for found in dropless]  # something is dropped


@pytest.mark.parametrize("domain_size", [4, 1], ids=["one domain", "a domain a rank"])
def test_a_captured_iteration_trains_bit_for_bit_like_one_that_is_not(
    gpus: MegatronRanks, domain_size: int
) -> None:
    """All micro-batches, forward and backward. `tests/gpu/whole_iteration.py` is for ranks on one GPU."""
    plain, graphed = (
        gpus.run("graph_case.train_whole", graphed=graphed, domain_size=domain_size)
        for graphed in (False, True)
    )
    assert [found[2] for found in plain] == [0] * gpus.num_ranks
    assert [found[2] for found in graphed] == [1] * gpus.num_ranks
    assert [found[:2] for found in graphed] == [found[:2] for found in plain]


def test_an_iteration_whose_counts_only_the_host_can_read_is_not_captured(gpus: MegatronRanks) -> None:
    with pytest.raises(CaseError, match=r"ConfigError.*moe_pad_expert_input_to_capacity"):
        gpus.run("graph_case.train_whole", graphed=True, padded=False)


def test_preprocessing_that_leaves_something_out_of_the_graph_is_seen(gpus: MegatronRanks) -> None:
    """Then the gradient of the probabilities leads into the capture, which is over."""
    with pytest.raises(CaseError, match="backward through the graph a second time"):
        gpus.run("graph_case.train", dispatcher="uccl_ep", modules=PREPROCESS, forget=True)


def test_stock_trains_with_the_same_graphs(gpus: MegatronRanks) -> None:
    """Else what ours does with them shows nothing."""
    stock = gpus.run("graph_case.train", dispatcher="alltoall", modules=ROUTER)
    ours = gpus.run("graph_case.train", dispatcher="uccl_ep", modules=ROUTER)
    assert [found[:2] for found in ours] == [found[:2] for found in stock]
