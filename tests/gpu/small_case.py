"""A few operations of every kind, for compute-sanitizer: see scripts/sanitize.sh.

One rank, or as torchrun starts them: in one domain, then in a domain each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.group.bootstrap import LocalBootstrap
from uccl_ep_train.settings.sections import WireDtype

T, H, K, E = 70, 1024, 3, 8
MANY = 600
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
        given = Fp8Rows(x_TH.detach().to(torch.float8_e4m3fn), torch.ones(T, H // 128, device=buffer.device))
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


def main() -> None:
    ranks, here = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(here)
    if ranks > 1:
        dist.init_process_group("gloo")
    for domain_size in sorted({1, ranks}, reverse=True):
        for bulk_copies, num_sms in ((True, 24), (False, 24), (True, 2)):
            config = EpConfig(
                num_experts=E, hidden=2 * H, backend="cuda", dispatch_dtype="bf16", budget_bytes=48 << 20,
                domain_size=domain_size, transport="loop", bulk_copies=bulk_copies, num_sms=num_sms,
                arrival_timeout_s=300.0, progress_timeout_s=300.0,
            )  # fmt: skip
            bootstrap = LocalBootstrap.create(1)[0] if ranks == 1 else None
            with Buffer(None, config, bootstrap=bootstrap) as buffer:
                if num_sms == 2:
                    use_much(buffer)
                    continue
                for dtype, wire in CASES:
                    use(buffer, dtype, wire)
        print(f"small case done: {ranks} ranks in domains of {domain_size}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
