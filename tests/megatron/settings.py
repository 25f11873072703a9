"""What a case is told and what it returns. Light: the test process itself never imports Megatron."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainCase:
    """One training. `config`: further TransformerConfig arguments. `options`: the plug-in's."""

    dispatcher: str = "uccl_ep"
    steps: int = 5
    num_microbatches: int = 2
    dtype: str = "fp32"
    ep: int = 4
    tp: int = 1
    etp: int = 1
    pp: int = 1
    chunks: int = 1  # of the model, on each rank: virtual pipeline stages
    layers: int = 2
    experts: int = 8
    topk: int = 2
    dist_opt: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    corrupt: str = ""  # a fault put into the dispatcher on purpose: see `_corrupt`
    seed: int = 7


@dataclass(frozen=True)
class Outcome:
    """Of one rank. Digests are of the raw bytes, so equal digests mean bitwise equal tensors."""

    losses: tuple[float, ...]
    parameters: str
    step_parameters: tuple[str, ...]
    expert_inputs: tuple[
        str, ...
    ]  # rows, rows per expert, probabilities; per forward pass of the first layer
    dispatchers: tuple[str, ...]
    stats: dict[str, Any]
    probe: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StageCase:
    """One pass through the six stages. `tokens`: by rank."""

    dtype: str = "bf16"
    router_dtype: str = "fp32"
    ep: int = 4
    tp: int = 1
    etp: int = 1
    experts: int = 8
    topk: int = 2
    hidden: int = 128
    tokens: tuple[int, ...] = (24, 24, 24, 24)
    routing: str = "random"  # | one_expert | zero_probs | dropped
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    captured: bool = False  # our dispatcher is told that it becomes part of a CUDA graph
    quantization_padding: bool = False
    rank_capacity: float | None = None  # rows that a rank has room for, of those that all alike would get
    options: dict[str, Any] = field(default_factory=dict)
    corrupt: str = ""  # "" | zero_prob_grad | zero_row | topk_of_probs | rank_order


@dataclass(frozen=True)
class ProxyOutcome:
    """Of one rank of proxy_case.train_proxy."""

    losses: tuple[float, ...]
    parameters: str
    bias: tuple[float, ...]  # of the last layer's experts
    most_groups: int  # of a token's experts
    shared: int  # parameters of shared experts
    dispatchers: tuple[str, ...]
