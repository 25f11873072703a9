"""What a dispatch returns. R = received rows (padding included), H = hidden, L = experts of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchHandle:
    """The plan of one dispatch: needed by `combine`, and by later dispatches with the same routing.

    A handle belongs to its buffer and holds at most 16 bytes per pair sent or received. Frozen; any number
    may be in use at a time; freed when the last reference is gone.

    num_tokens               T, rows of x that were dispatched from this rank
    num_rows                 R, rows received, padding included
    tokens_per_expert        rows of each local expert, padded to `expert_alignment`; their sum is num_rows
    tokens_per_expert_exact  the same without padding
    plan_id                  equal on all ranks
    expert_alignment         rows
    nbytes                   memory held by the plan
    """

    num_tokens: int
    num_rows: int
    tokens_per_expert: tuple[int, ...]
    tokens_per_expert_exact: tuple[int, ...]
    plan_id: int
    expert_alignment: int
    nbytes: int
    routing_kind: str
    routing_width: int
    plan: Any = field(repr=False)
    owner: object = field(repr=False)
    storage: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of_plan(cls, plan: Any, owner: object, storage: Tensor | None = None) -> DispatchHandle:
        """From a native plan; `owner` identifies the buffer, `storage` is the plan's memory on a GPU."""
        return cls(
            num_tokens=plan.num_tokens,
            num_rows=plan.num_rows,
            tokens_per_expert=tuple(plan.tokens_per_expert),
            tokens_per_expert_exact=tuple(plan.tokens_per_expert_exact),
            plan_id=plan.plan_id,
            expert_alignment=plan.expert_alignment,
            nbytes=plan.nbytes,
            routing_kind=plan.routing_kind,
            routing_width=plan.routing_width,
            plan=plan,
            owner=owner,
            storage=storage,
        )


class Fp8Rows(NamedTuple):
    """Rows as a block-scaled GEMM takes them: value = code * scale of its block of 128 columns.

    codes   [R, H] float8_e4m3fn
    scales  [R, H / 128] float32
    """

    codes: Tensor
    scales: Tensor


class DispatchResult(NamedTuple):
    """What `Buffer.dispatch` returns.

    rows               [R, H], dtype of x; expert-major, each expert's segment padded with zero rows. With
                       output_dtype = "fp8": `Fp8Rows`
    tokens_per_expert  [L] int64 on the CPU: rows of each local expert, padding included
    row_weights        [R] float32, zero for padding; None if the dispatch was given no weights
    handle             for `combine` and for later dispatches with the same routing
    """

    rows: Any
    tokens_per_expert: Tensor
    row_weights: Tensor | None
    handle: DispatchHandle
