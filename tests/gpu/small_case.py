"""A few operations of every kind, for compute-sanitizer: see scripts/sanitize.sh.

One rank, or as torchrun starts them: in one domain, then in a domain each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.slots import SlotStatistics, SlotWireName
from uccl_ep_train.core import topk
from uccl_ep_train.group.bootstrap import LocalBootstrap
from uccl_ep_train.settings.sections import WireDtype

T, H, K, E = 70, 1056, 3, 8  # the last FP8 block of a row is short
MANY = 600
SLOT_WIRES: tuple[tuple[SlotWireName, bool], ...] = (
    ("bf16", False),
    ("fp8", False),
    ("fp8", True),
    ("fp8_fp32", False),
)
CASES: tuple[tuple[torch.dtype, WireDtype], ...] = (
    (torch.bfloat16, "fp8"),
    (torch.bfloat16, "bf16"),
    (torch.float32, "bf16"),
)


def use(buffer: Buffer, dtype: torch.dtype, wire: WireDtype) -> None:
    x_TH = torch.ones(T, H, dtype=dtype, device=buffer.device, requires_grad=True)
    idx_TK = torch.arange(T * K, device=buffer.device).reshape(T, K) % E
    weights_TK = torch.ones(T, K, device=buffer.device, requires_grad=True)
    for options in (
        {},
        {"layout": "compact"},
        {"capacity": T * K - 20},
        {"capacity": 8 * T * K, "pad_to_capacity": True},
        {"capacity": 8 * T * K, "pad_to_capacity": True, "layout": "compact"},
        {"expert_alignment": 16},
    ):
        result = buffer.dispatch(x_TH, idx_TK, weights_TK, dispatch_dtype=wire, **options)
        out_TH = buffer.combine(result.rows, result.handle)
        assert result.row_weights is not None
        (out_TH.sum() + result.row_weights.sum()).backward()
        torch.cuda.synchronize()
        buffer.check()
    if wire == "fp8":
        buffer.dispatch(x_TH, idx_TK, dispatch_dtype="fp8", output_dtype="fp8")
    metadata = torch.ones(T, 5, dtype=torch.int32, device=buffer.device)
    if dtype == torch.bfloat16:
        given = Fp8Rows(
            x_TH.detach().to(torch.float8_e4m3fn), torch.ones(T, -(-H // 128), device=buffer.device)
        )
        result = buffer.dispatch(given, idx_TK, metadata=metadata, expert_alignment=16)
        assert result.metadata is not None and result.metadata.max() == 1
    buffer.dispatch(x_TH, idx_TK, metadata=metadata, dispatch_dtype=wire, layout="compact")
    buffer.dispatch(x_TH, idx_TK, handle=buffer.dispatch(x_TH, idx_TK, dispatch_dtype=wire).handle)
    routing_map = torch.zeros(T, E, dtype=torch.bool, device=buffer.device)
    routing_map[:, 1::2] = True
    result = buffer.dispatch(x_TH, routing_map=routing_map, dispatch_dtype=wire)
    assert buffer.combine(result.rows, result.handle).eq(E // 2).all()
    torch.cuda.synchronize()
    buffer.check()


def use_much(buffer: Buffer) -> None:
    """More rows than the warps of two SMs look up at once: those of a new plan are planned beside them."""
    for wire in ("bf16", "fp8"):
        x_TH = torch.ones(MANY, 128, dtype=torch.bfloat16, device=buffer.device)
        idx_TK = torch.arange(2 * MANY, device=buffer.device).reshape(MANY, 2) % E
        result = buffer.dispatch(x_TH, idx_TK, dispatch_dtype=wire)
        assert buffer.combine(result.rows, result.handle).eq(2).all()
        torch.cuda.synchronize()
        buffer.check()


def use_slots(buffer: Buffer) -> None:
    """Low latency: every wire; weights that come with the routing, or with the rows."""
    calls, device = LowLatency(buffer), buffer.device
    x_TH = torch.ones(T, H, dtype=torch.bfloat16, device=device)
    idx_TK = torch.arange(T * K, device=device).reshape(T, K) % E
    weights_TK = torch.ones(T, K, device=device)
    rows = torch.ones(E // buffer.num_ranks, buffer.num_ranks * T, H, dtype=torch.bfloat16, device=device)
    waited_ns = torch.zeros(buffer.num_ranks, dtype=torch.int64, device=device)
    for wire, ue8m0 in SLOT_WIRES:
        for knows in (False, True):
            weights = weights_TK if knows else None
            told: tuple[Tensor | None, Tensor | None] = (None, None) if knows else (idx_TK, weights_TK)
            form: dict[str, Any] = {
                "wire": wire,
                "ue8m0": ue8m0,
                "statistics": SlotStatistics(None, waited_ns),
            }
            into = calls.dispatch(x_TH, idx_TK, weights, **form)
            out_TH = calls.combine(rows, *told, into.handle, waited_ns=waited_ns)
            into = calls.send_dispatch(x_TH, idx_TK, weights, **form).receive()
            assert out_TH.eq(K).all() and calls.send_combine(rows, *told, into.handle).receive().eq(K).all()
    assert not calls.masked_ranks().any()
    torch.cuda.synchronize()
    buffer.check()


def use_topk(device: torch.device) -> None:
    idx_TK = torch.arange(T * K, device=device).reshape(T, K) % (E + 1) - 1
    found = topk.layout_of(idx_TK, E, 4, 2)
    assert found.per_expert.sum() == (idx_TK >= 0).sum()
    words = topk.pack(device, T, 1, idx_TK, torch.ones(T, K, device=device))
    experts, weights = topk.unpack(words, K, True, 0, E)
    assert weights is not None and experts.eq(idx_TK).all() and weights.eq(idx_TK >= 0).all()
    torch.cuda.synchronize()


def opened(ranks: int, domain_size: int, **settings: Any) -> Buffer:
    config = EpConfig(
        num_experts=E, hidden=2 * H, backend="cuda", dispatch_dtype="bf16", budget_bytes=48 << 20,
        domain_size=domain_size, transport="loop", arrival_timeout_s=300.0, progress_timeout_s=300.0,
        **settings,
    )  # fmt: skip
    return Buffer(None, config, bootstrap=LocalBootstrap.create(1)[0] if ranks == 1 else None)


def main() -> None:
    ranks, here = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(here % torch.cuda.device_count())
    if ranks > 1:
        dist.init_process_group("gloo")
    use_topk(torch.device("cuda", torch.cuda.current_device()))
    for domain_size in sorted({1, ranks}, reverse=True):
        for bulk_copies, num_sms in ((True, 24), (False, 24), (True, 2)):
            with opened(ranks, domain_size, bulk_copies=bulk_copies, num_sms=num_sms) as buffer:
                if num_sms == 2:
                    use_much(buffer)
                    continue
                for dtype, wire in CASES:
                    use(buffer, dtype, wire)
        room = {"low_latency_tokens": T, "low_latency_topk": K}
        for settings in ({"bulk_copies": True}, {"bulk_copies": False}, {"mask_timeout_s": 300.0}):
            with opened(ranks, domain_size, **room, **settings) as buffer:
                use_slots(buffer)
        print(f"small case done: {ranks} ranks in domains of {domain_size}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
