"""Bytes that dispatch and combine of a layer send in forward and backward, and the time that they take.

Rows are the planner's, under uniform routing. Trained routers are less even, so some ranks get more.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.models.architecture import Model
from recipes.models.layout import FULL, Layout
from uccl_ep_train.planner import report
from uccl_ep_train.planner.events import simulate
from uccl_ep_train.planner.machine import Machine
from uccl_ep_train.planner.report import Prediction
from uccl_ep_train.planner.shape import Bytes, Router, Shape, row_bytes, spread, stock_bytes
from uccl_ep_train.settings.checks import HIDDEN_UNIT


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank in one MoE layer, for one micro-batch."""

    dispatch: Bytes
    combine: Bytes
    gradients: Bytes  # combine's backward, a dispatch; the backward of dispatch is a combine
    again: bool  # backward repeats dispatch and combine, to recompute the layer

    @property
    def total(self) -> Bytes:
        """Forward and backward."""
        return (self.dispatch + self.combine) * (2 if self.again else 1) + self.gradients + self.combine

    def wire_seconds(self, machine: Machine) -> float:
        """Of all, at full rates."""
        return 1e-6 * report.wire_us(self.total, machine)


@dataclass(frozen=True)
class Times:
    """What the planner predicts for one layer and micro-batch. gradients_us: of combine's backward."""

    found: Prediction
    gradients_us: float
    again: bool

    @property
    def total_us(self) -> float:
        """Forward and backward."""
        dispatch, combine = self.found.dispatch.us, self.found.combine.us
        return (dispatch + combine) * (2 if self.again else 1) + self.gradients_us + combine


def shape_of(model: Model, layout: Layout, domain_size: int, dtype: str) -> Shape:
    """The planner's shape of one operation. Raises InputError for domains or experts that cannot be."""
    router = Router(
        num_experts=model.num_experts,
        topk=model.topk,
        num_groups=model.router.num_groups,
        group_topk=model.router.group_topk,
    )
    return Shape.split(
        layout.ep,
        domain_size,
        router=router,
        tokens=layout.tokens_per_pass,
        hidden=model.hidden_size + -model.hidden_size % HIDDEN_UNIT,
        dtype=dtype,
    )


def of_layer(model: Model, layout: Layout, domain_size: int, dtype: str, grad_dtype: str = "bf16") -> Traffic:
    """The traffic of uccl_ep. FlexDispatcher's DeepEP and HybridEP send the same rows in BF16."""
    shape = shape_of(model, layout, domain_size, dtype)
    at = spread(shape.router, shape.domains)
    value = 4  # bytes of a pair's probability
    return Traffic(
        dispatch=at.bytes(shape.tokens, row_bytes(shape.hidden, dtype), value),
        combine=at.bytes(shape.tokens, row_bytes(shape.hidden, "bf16"), 0),
        gradients=at.bytes(shape.tokens, row_bytes(shape.hidden, grad_dtype), value),
        again=_again(layout),
    )


def of_stock_layer(model: Model, layout: Layout, domain_size: int) -> Traffic:
    """The traffic of Megatron's alltoall dispatcher: a BF16 row for every pair, wherever it goes."""
    shape = shape_of(model, layout, domain_size, "bf16")
    one_way = stock_bytes(shape) * (model.hidden_size / shape.hidden)
    return Traffic(one_way, one_way, one_way, _again(layout))


def times_of_layer(
    model: Model, layout: Layout, machine: Machine, domain_size: int, dtypes: tuple[str, str], budget: int
) -> Times:
    """Predicted times of uccl_ep. dtypes: of dispatched rows, and of gradients; budget: the buffer's, bytes.

    Raises what creating the buffer raises.
    """
    shape = shape_of(model, layout, domain_size, dtypes[0])
    found = report.predict(machine, shape, budget, shape.tokens)
    backward = shape_of(model, layout, domain_size, dtypes[1])
    gradients = simulate(machine, backward, report.sizes_of(backward, budget, shape.tokens), "dispatch")
    return Times(found, gradients.us, _again(layout))


def _again(layout: Layout) -> bool:
    return layout.recompute == FULL or "moe" in layout.recompute
