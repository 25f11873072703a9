"""Inputs of low-latency calls, for an engine and the oracle, and the comparison of what both give.

Shapes: T tokens of a rank, M the most of them, R ranks, H hidden, K experts per token, E experts, L = E / R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.bits import bit_difference
from tests.cases import LAYOUTS, EngineSpec
from uccl_ep_train import Buffer
from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.common.slots import SlotRows, SlotWireName
from uccl_ep_train.oracle.low_latency import Slots, combine_slots, dispatch_slots, stretches

H, E, K, M = 384, 12, 6, 24
TOKENS = {"unequal": (20, 0, M, 5), "none": (0, 0, 0, 0), "all to one expert": (M, M, M, M)}
WIRES: tuple[tuple[SlotWireName, bool], ...] = (
    ("bf16", False),
    ("fp8", False),
    ("fp8", True),
    ("fp8_fp32", False),
)
ROOM = (("low_latency_tokens", M), ("low_latency_topk", K))
SPECS = {
    "1x4": EngineSpec(
        domains=LAYOUTS["1x4"], num_experts=E, hidden=H, source_order=(2, 0, 3, 1), settings=ROOM
    ),
    "2x2, small windows": EngineSpec(
        domains=LAYOUTS["2x2"],
        num_experts=E,
        hidden=2 * H,
        combine_wire_dtype="fp32",
        settings=(("chunk_bytes", 8192), ("window_chunks", 2), *ROOM),
    ),
    "3+1": EngineSpec(domains=LAYOUTS["3+1"], num_experts=E, hidden=H, fp8_scale="fp32", settings=ROOM),
    "interleaved": EngineSpec(domains=LAYOUTS["interleaved"], num_experts=E, hidden=H, settings=ROOM),
    "2x1": EngineSpec(domains=LAYOUTS["2x1"], num_experts=E, hidden=H, settings=ROOM),
    "1x1": EngineSpec(domains=(0,), num_experts=E, hidden=H, settings=ROOM),
}


class Given(NamedTuple):
    """The inputs of all ranks, on the CPU: x [T, H], topk_idx and topk_weights [T, K], outputs [L, R * M, H]
    of the experts, with NaN in every row that no token has.
    """

    x: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    outputs: list[Tensor]

    def on(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, topk_idx, topk_weights, outputs = (of_ranks[rank].to(device) for of_ranks in self)
        return x, topk_idx, topk_weights, outputs

    def sent(self, wire: str = "bf16", ue8m0: bool = False) -> list[Slots]:
        with torch.device("cpu"):
            return dispatch_slots(self.x, self.topk_idx, E, M, wire, ue8m0)

    def sums(self, spec: EngineSpec) -> list[Tensor]:
        with torch.device("cpu"):
            given = self.outputs, self.topk_idx, self.topk_weights
            return combine_slots(*given, spec.domains, spec.combine_wire_dtype)


def make_rows(generator: torch.Generator, *shape: int) -> Tensor:
    """[..., H] bfloat16: each block of 128 of another magnitude, and some blocks of zeros."""
    exponents = torch.randint(-40, 40, (*shape[:-1], shape[-1] // 128, 1), generator=generator)
    values = torch.randn(*exponents.shape[:-1], 128, generator=generator) * 2.0**exponents
    return values.masked_fill(exponents > 37, 0.0).view(shape).to(torch.bfloat16)


def give(spec: EngineSpec, kind: str = "unequal", seed: int = 0) -> Given:
    with torch.device("cpu"):  # whatever the rank's default device is
        generator = torch.Generator().manual_seed(seed)
        tokens = TOKENS[kind][: spec.num_ranks]
        x = [make_rows(generator, T, H) for T in tokens]
        topk_idx = [torch.rand(T, E, generator=generator).argsort(1)[:, :K].contiguous() for T in tokens]
        for idx in topk_idx:
            idx[torch.rand(idx.shape, generator=generator) < 0.3] = -1
            if kind == "all to one expert":
                idx[idx == E - 1] = -1
                idx[:, 2] = E - 1
        weights = [torch.randn(T, K, generator=generator) for T in tokens]
        for of_tokens in weights:
            of_tokens[::3] = of_tokens[1::3] = 1.0
        return Given(x, topk_idx, weights, make_outputs(generator, topk_idx))


def make_outputs(generator: torch.Generator, topk_idx: list[Tensor]) -> list[Tensor]:
    """Rows of a token's experts nearly cancel where weights are 1, so that each order of sums has other bits.
    Rows without a token are NaN.
    """
    ranks = range(len(topk_idx))
    large = [torch.randn(len(idx), H, generator=generator) * 2.0**20 for idx in topk_idx]
    outputs = []
    for owner in ranks:
        rows = torch.full((E // len(ranks), len(ranks) * M, H), torch.nan, dtype=torch.bfloat16)
        for stretch in stretches(topk_idx, owner, E):
            sign = (0, 1, -1)[stretch.expert % 3]
            small = torch.randn(len(stretch.tokens), H, generator=generator)
            values = sign * large[stretch.source][stretch.tokens] if sign else small
            rows[stretch.local, stretch.rows] = values.to(torch.bfloat16)
        outputs.append(rows)
    return outputs


def slot_differences(seen: SlotRows, wanted: Slots) -> list[str]:
    """What is not bit for bit what the oracle says, in rows that have a token."""
    handle = seen.handle
    pairs = [
        ("counts", seen.counts.cpu(), wanted.counts),
        ("counts of the handle", handle.counts.cpu(), wanted.counts),
        ("ranges", handle.ranges.cpu(), wanted.ranges),
    ]
    parts = [("source_tokens", handle.source_tokens, wanted.source_tokens)]
    if isinstance(seen.rows, Fp8Rows) and isinstance(wanted.rows, Fp8Rows):
        parts += [
            ("codes", seen.rows.codes, wanted.rows.codes),
            ("scales", seen.rows.scales, wanted.rows.scales),
        ]
    else:
        assert isinstance(seen.rows, Tensor) and isinstance(wanted.rows, Tensor)
        parts.append(("rows", seen.rows, wanted.rows))
    found = [f"{name}: {why}" for name, *values in pairs if (why := bit_difference(*values))]
    for name, got, want in parts:
        if got.shape != want.shape:
            found.append(f"{name}: {list(got.shape)}, wanted {list(want.shape)}")
        for local, count in enumerate(wanted.counts.tolist()):
            if why := bit_difference(got[local, :count].cpu(), want[local, :count]):
                found.append(f"{name} of expert {local}: {why}")
    return found


def column_major(scales: Tensor) -> bool:
    num_rows, columns = scales.shape[1:]
    return scales.stride() == (num_rows * columns, 1, num_rows)


def told(early: bool, *routing: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What a combine is given of topk_idx and topk_weights. early: the dispatch was given them"""
    topk_idx, topk_weights = routing
    return (None, None) if early else (topk_idx, topk_weights)


def settle(buffer: Buffer) -> None:
    """On a GPU an error shows when the kernels are over."""
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()
    buffer.check()
