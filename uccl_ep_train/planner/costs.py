"""What ports of the event model take for rows, in microseconds, and bytes of packets."""

from __future__ import annotations

import math

from uccl_ep_train.planner.machine import Machine
from uccl_ep_train.planner.shape import Shape

_VALUE_BYTES = 4  # a router weight of a pair


class Costs:
    """Microseconds of the SMs and ports for rows of one shape."""

    def __init__(self, machine: Machine, shape: Shape, op: str) -> None:
        k, self.scale = machine.kernels, 24e-3 / machine.num_sms  # from ns of 24 SMs to us
        self.machine, self.kernels = machine, k
        wire = shape.dtype if op == "dispatch" else "bf16"
        self.row = float(shape.row_bytes(wire))
        self.input_row = 2.0 * shape.hidden
        expands = shape.dtype == "fp8" and not shape.codes
        out_kb = (shape.row_bytes("fp8") if shape.codes else 2 * shape.hidden) / 1e3
        self.pair_ns = out_kb * (k.expand_ns if expands else k.place_ns)
        self.pair_ns += k.expand_row_ns if expands else k.codes_ns if shape.codes else 0.0
        # Segments of 3584 bytes where whole ones fill a row, else of 2048: csrc/backend/gpu/sum_bulk.cuh.
        segment = 3584 if self.input_row % 3584 == 0 else 2048
        self.steps = math.ceil(self.input_row / segment)
        self.step_ns = k.step_ns + k.step_byte_ns * segment / 1e3

        several = len(shape.domains) > 1
        self.stage_ns = self.input_row / 1e3 * (machine.stage_several_ns if several else machine.stage_ns)
        self.tokens_of_row = shape.tokens / max(1.0, float(shape.counts.to_domain_SD.sum(1).mean()))

    def stage(self, rows: float) -> float:
        """Of the tokens behind rows for one domain: a token is read once for all its domains."""
        return rows * self.tokens_of_row * self.stage_ns * self.scale

    def place(self, pairs: float, remote_rows: float) -> float:
        return (pairs * self.pair_ns + remote_rows * self.row / 1e3 * self.kernels.pull_ns) * self.scale

    def fold(self, pairs: float, rows: float) -> float:
        """Adds each pair's row, and writes a piece for each row."""
        return (pairs + rows) * self.steps * self.step_ns * self.scale

    def merge(self, pieces: float) -> float:
        return pieces * self.steps * self.kernels.merge_ns * self.scale

    def link(self, rows: float) -> float:
        return rows * self.row / (self.machine.link_gbps * self.kernels.link_share) * 1e-3

    def nic(self, num_bytes: float) -> float:
        return num_bytes / self.machine.nic_gbps * 1e-3


def packet_bytes(shape: Shape, domain_size: int, tokens: int, new_plan: bool) -> float:
    """Of the header, weights and, with a new plan, routing that a rank sends to a domain, on average.
    csrc/backend/gpu/packet.h."""
    pairs = tokens * shape.router.topk * domain_size / shape.num_ranks
    weights = 64 + _VALUE_BYTES * pairs
    if not new_plan:
        return weights
    counts = shape.counts
    rows = float(counts.to_rank_SR.mean()) * domain_size * tokens / shape.tokens
    stream = float(counts.to_domain_SD.mean()) * tokens / shape.tokens
    blocks = tokens / 32 + 1
    each = shape.router.num_experts / shape.num_ranks
    tables = 4 * domain_size * each + 8 * (domain_size + 1) + 4 * (domain_size + 2) * blocks
    return weights + tables + 16 * rows + 4 * pairs + 4 * (stream + 1)
