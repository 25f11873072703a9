"""How many SMs the plug-in gives a buffer: more where Megatron computes nothing beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from uccl_ep_train import Gpu, Wire
from uccl_ep_train.megatron.buffers import BufferPool


def model(**flags: bool) -> Any:
    return SimpleNamespace(params_dtype=torch.bfloat16, hidden_size=256, num_moe_experts=8, **flags)


def sms_of(pool: BufferPool, config: Any) -> int:
    return pool.ep_config(config, tp_size=1, ep_size=4).num_sms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.delenv("UCCL_EP_NUM_SMS", raising=False)
    return properties


def test_alone_it_takes_more_than_the_default(gpu: Any) -> None:
    assert sms_of(BufferPool({}), model()) == 44  # a third of 132
    gpu.multi_processor_count = 400
    assert sms_of(BufferPool({}), model()) == 48
    gpu.multi_processor_count = 20  # no less than anywhere
    assert sms_of(BufferPool({}), model()) == 24


@pytest.mark.parametrize("flag", ["overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap"])
def test_beside_computation_it_takes_the_default(gpu: Any, flag: str) -> None:
    assert sms_of(BufferPool({}), model(**{flag: True})) == 24


def test_what_was_asked_for_stays(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"num_sms": 10}, {"gpu": Gpu(num_sms=10)}):
        assert sms_of(BufferPool(options), model()) == 10
    assert sms_of(BufferPool({"gpu": Gpu(backend="cuda")}), model()) == 44  # which says nothing of SMs
    asking = model(moe_flex_dispatcher_num_sms=30)  # Megatron-LM main
    assert sms_of(BufferPool({}), asking) == 30
    assert sms_of(BufferPool({"num_sms": 10}), asking) == 10
    monkeypatch.setenv("UCCL_EP_NUM_SMS", "12")
    assert sms_of(BufferPool({}), model()) == 12


def test_without_a_gpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCCL_EP_NUM_SMS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sms_of(BufferPool({}), model()) == 24


def test_the_environment_widens_a_bf16_models_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For experts that return FP32 rows. Control: without the variable slots are for BF16."""
    for variable in ("UCCL_EP_MAX_DTYPE", "UCCL_EP_COMBINE_WIRE_DTYPE"):
        assert BufferPool({}).ep_config(model(), tp_size=1, ep_size=4).memory.max_dtype == "bf16"
        with monkeypatch.context() as patched:
            patched.setenv(variable, "fp32")
            assert BufferPool({}).ep_config(model(), tp_size=1, ep_size=4).memory.max_dtype == "fp32"


def test_sections_as_options_mean_what_their_settings_mean() -> None:
    for options in ({"combine_wire_dtype": "fp32"}, {"wire": Wire(combine_wire_dtype="fp32")}):
        config = BufferPool(options).ep_config(model(), tp_size=1, ep_size=4)
        assert (config.wire.combine_wire_dtype, config.memory.max_dtype) == ("fp32", "fp32")
    assert BufferPool({"wire": Wire()}).ep_config(model(), tp_size=1, ep_size=4).memory.max_dtype == "bf16"
    assert BufferPool({"wire": Wire(grad_dtype="fp8")}).options == {"grad_dtype": "fp8"}
