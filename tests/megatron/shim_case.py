"""Runs on the ranks: what the CPU shims changed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from uccl_ep_train.megatron import cpu_shims

_PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(5, 7), (7, 3)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), [(5, 3), (5, 7), (7, 3)]),
    "addmm, broadcast": (torch.addmm, [(3,), (5, 7), (7, 3)]),
    "bmm": (torch.bmm, [(2, 5, 7), (2, 7, 3)]),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.0, alpha=0.25),
        [(2, 5, 3), (2, 5, 7), (2, 7, 3)],
    ),
    "empty": (torch.mm, [(0, 7), (7, 3)]),
}


def installed(rank: int) -> list[str]:
    return cpu_shims.install()


def products(rank: int) -> dict[str, float]:
    """Largest difference to the FP32 product rounded once, of those that differ by more than one rounding."""
    found = {}
    for name, (product, shapes) in _PRODUCTS.items():
        generator = torch.Generator().manual_seed(rank)
        low = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes]
        wide = [t.detach().float().requires_grad_() for t in low]
        out_low, out_wide = product(*low), product(*wide)
        out_low.backward(torch.ones_like(out_low))
        out_wide.backward(torch.ones_like(out_wide))
        pairs = [(out_low, out_wide)]
        pairs += [(a.grad, b.grad) for a, b in zip(low, wide, strict=True) if a.grad is not None]
        for ours, exact in pairs:
            if ours.dtype != torch.bfloat16 or exact.dtype != torch.float32:
                found[name] = float("inf")
            elif not torch.allclose(ours.float(), exact.bfloat16().float(), rtol=2**-7, atol=1e-6):
                found[name] = float((ours.float() - exact).abs().max())
    return found
