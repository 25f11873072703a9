"""What cannot be a value of DeepEP's arguments is a typed error with its name, and the buffer goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.process_ranks import Rank
from tests.unit.deep_ep_gpus import module_ranks
from uccl_ep_train.deep_ep import Buffer, Config, ElasticBuffer
from uccl_ep_train.errors import DeviceError, EpError

E, H = 8, 128
NUMBERS: tuple[Any, ...] = (-1, 1.5, "x", True, 1 << 80)
Wrong = dict[str, tuple[Any, ...]]


def refuse(call: Callable[..., Any], wrong: Wrong) -> None:
    """Each value alone is refused by an error with the argument's name."""
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(EpError) as refused:
                call(**{name: value})
            assert name in str(refused.value) and "allowed" in str(refused.value), (
                name,
                value,
                refused.value,
            )


def first_interface(seat: Rank) -> str:
    buffer = Buffer(dist.group.WORLD)
    x, idx, weights = torch.ones(2, H).bfloat16(), torch.tensor([[0, 1], [2, -1]]), torch.rand(2, 2)
    codes = x.to(torch.float8_e4m3fn)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
    given: dict[str, Any] = {"x": x, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    given |= {"topk_idx": idx, "topk_weights": weights}
    rows, _, _, _, handle, _ = buffer.dispatch(**given)
    worst = buffer.dispatch(**(given | {"num_worst_tokens": np.int64(9), "expert_alignment": np.int32(1)}))
    assert len(worst[0]) == 9 and torch.equal(worst[0][: len(rows)], rows)
    refuse(
        lambda **wrong: buffer.dispatch(**(given | wrong)),
        {
            "x": ("x", (codes, None), (codes, "x"), (x,), [x]),
            "is_token_in_rank": (None, "x", x[:1], in_rank.int()),
            "num_tokens_per_expert": (None, "x"),
            "expert_alignment": (0, None, *NUMBERS),
            "num_worst_tokens": (None, *NUMBERS),
            "config": ("x", *map(Config, (0, *NUMBERS))),
            "previous_event": ("x",),
        },
    )
    with pytest.raises(EpError, match=r"is_token_in_rank is \[2, 1\] .*; allowed is \[3, 1\]"):
        buffer.dispatch(**(given | {"x": torch.ones(3, H).bfloat16()}))
    refuse(
        lambda **wrong: buffer.dispatch(**({"x": x, "handle": handle} | wrong)), {"x": ((codes, None), "x")}
    )
    refuse(
        lambda **wrong: buffer.combine(**({"x": rows, "handle": handle} | wrong)), {"x": ((rows, rows), "x")}
    )
    refuse(
        lambda **wrong: buffer.get_dispatch_layout(**({"topk_idx": idx, "num_experts": E} | wrong)),
        {"num_experts": (0, None, *NUMBERS), "previous_event": ("x",)},
    )
    assert torch.equal(buffer.dispatch(**given)[0], rows)
    buffer.destroy()
    return "done"


def second_interface(seat: Rank) -> str:
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4)
    x, idx, weights = torch.ones(2, H).bfloat16(), torch.tensor([[0, 1], [2, -1]]), torch.rand(2, 2)
    codes = x.to(torch.float8_e4m3fn)
    given: dict[str, Any] = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E}
    rows, _, _, handle, _ = buffer.dispatch(**given)
    refuse(
        lambda **wrong: buffer.dispatch(**(given | wrong)),
        {
            "x": ("x", (codes, None), (codes, "x")),
            "num_experts": (0, None, *NUMBERS),
            "num_max_tokens_per_rank": (0, 1, *NUMBERS),
            "expert_alignment": (0, *NUMBERS),
            "num_sms": (1025, *NUMBERS),
        },
    )
    refuse(
        lambda **wrong: buffer.combine(**({"x": rows, "handle": handle} | wrong)), {"x": ((rows, rows), "x")}
    )
    refuse(lambda **wrong: buffer.all_gather(**wrong), {"t": ("x", [x, "x"])})
    counted = buffer.dispatch(**(given | {"num_experts": np.int64(E), "expert_alignment": np.int32(1)}))
    assert torch.equal(counted[0], rows), "an integer of another type is a number, too"
    assert not buffer.dispatch(**given, do_cpu_sync=0)[3].do_cpu_sync, "a false value is False"
    assert torch.equal(buffer.dispatch(**given)[0], rows)
    buffer.destroy()
    return "done"


def low_latency(seat: Rank) -> str:
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
    x, idx, weights = torch.ones(2, H).bfloat16(), torch.tensor([[0, 1], [2, -1]]), torch.rand(2, 2)
    sizes: dict[str, Any] = {"num_max_dispatch_tokens_per_rank": 4, "num_experts": E}
    given: dict[str, Any] = {"x": x, "topk_idx": idx, "use_fp8": False} | sizes
    rows, _, handle, _, _ = buffer.low_latency_dispatch(**given)
    numbers: Wrong = dict.fromkeys(sizes, (0, None, *NUMBERS))
    refuse(
        lambda **wrong: buffer.low_latency_dispatch(**(given | wrong)),
        {"x": ("x", (x, x)), **numbers, "dispatch_wait_recv_cost_stats": ()},
    )
    for wrong in ("x", torch.zeros(0, 4, dtype=torch.int64)):
        with pytest.raises(EpError, match="allowed"):
            buffer.low_latency_dispatch(**given, dispatch_wait_recv_cost_stats=wrong)
    sums: dict[str, Any] = {"x": rows, "topk_idx": idx, "topk_weights": weights, "handle": handle}
    refuse(
        lambda **wrong: buffer.low_latency_combine(**(sums | wrong)),
        {"x": ("x", (rows, rows)), "handle": (None, tuple(handle))},
    )
    refuse(buffer.get_next_low_latency_combine_buffer, {"handle": (None, tuple(handle))})
    clean = sizes | {"hidden": H}
    refuse(
        lambda **wrong: buffer.clean_low_latency_buffer(**(clean | wrong)),
        numbers | {"hidden": (0, *NUMBERS)},
    )
    refuse(
        buffer.low_latency_query_mask_buffer,
        {"mask_status": ("x", torch.zeros(1), torch.zeros(3, dtype=torch.int32))},
    )
    again = buffer.low_latency_dispatch(**given)[0]
    assert isinstance(rows, torch.Tensor) and isinstance(again, torch.Tensor)
    assert torch.equal(again[0, 0], rows[0, 0])
    buffer.destroy()
    return "done"


@pytest.mark.parametrize("interface", [first_interface, second_interface, low_latency])
def test_wrong_values_are_refused_and_right_ones_go_on(interface: Callable[[Rank], str]) -> None:
    with module_ranks(1, interface) as ranks:
        for outcome in ranks.outcomes(timeout_s=60).values():
            assert outcome.value == "done", outcome.trace


def test_wrong_sizes_and_groups_are_refused_at_once() -> None:
    group: Any = type("Group", (), {"rank": lambda self: 0, "size": lambda self: 1})()
    sizes: Wrong = dict.fromkeys(("num_nvl_bytes", "num_rdma_bytes"), (None, *NUMBERS))
    refuse(lambda **wrong: Buffer(**({"group": group} | wrong)), sizes | {"group": (None, "x")})
    refuse(
        lambda **wrong: ElasticBuffer(**({"group": group} | wrong)),
        {"num_bytes": NUMBERS, "num_max_tokens_per_rank": (None, *NUMBERS), "group": (None, "x")},
    )
    hint = {"num_max_dispatch_tokens_per_rank": 4, "hidden": H, "num_ranks": 1, "num_experts": E}
    refuse(
        lambda **wrong: Buffer.get_low_latency_rdma_size_hint(**(hint | wrong)),
        dict.fromkeys(hint, (0, None, *NUMBERS)),
    )
    assert Buffer.get_low_latency_rdma_size_hint(**hint) > 0
    for value in (0, 1, 21, 1026, None, *NUMBERS):
        with pytest.raises(EpError, match=r"num_sms = .*; allowed"):
            Buffer.set_num_sms(value)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no GPU"):
            Buffer(group).get_comm_stream()
