"""How a model is spread over GPUs, and what a full-size recipe sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recipes.models.architecture import Model

FULL = ("full",)  # recompute: whole layers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tensor parallelism is 1 in all recipes: experts are cut by expert parallelism, the rest is small.

    Every rank is data parallel for attention inside its pipeline stage. Consecutive ranks form an expert
    parallel group, so a group fills whole nodes.
    """

    num_ranks: int
    pp: int = 1  # pipeline stages
    last_stage_layers: int | None = None  # None: as many as the other stages
    ep: int  # ranks that share the experts of a layer
    sequence_length: int = 4096  # tokens
    micro_batch_size: int = 1  # sequences of a rank in a forward pass
    global_batch_size: int  # sequences of all ranks in a step
    recompute: tuple[str, ...] = ()  # in backward: FULL, or names of Megatron's recompute modules
    fp8_recipe: str | None = None  # of matrix products: "blockwise" | "mxfp8"; None: BF16
    distributed_optimizer: bool = True  # its state is spread over the ranks that hold the same parameters
    optimizer_bytes: int = 12  # per parameter: FP32 master weight and moments; 8: BF16 moments

    @property
    def dp(self) -> int:
        """Ranks with the same pipeline stage."""
        return self.num_ranks // self.pp

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of a rank in a forward pass."""
        return self.micro_batch_size * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Optimizer steps of a full-size recipe."""

    num_steps: int
    warmup_steps: int
    lr: float
    min_lr: float
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    clip_grad: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """A full-size recipe, trained by Megatron-LM's pretrain_gpt.py.

    token_dispatcher  the recipe's choice, which `--token-dispatcher` overrides
    """

    name: str
    model: Model
    layouts: Mapping[str, Layout] = field(repr=False)  # by node type, see hardware.py
    schedule: Schedule
    token_dispatcher: str = "uccl_ep"
    dispatch_dtype: str = "fp8"  # rows on the wire, uccl_ep
    grad_dtype: str = "bf16"  # gradients of combine on the wire, uccl_ep
    budget_bytes: int = 512 << 20  # memory of the dispatcher per rank at most, uccl_ep
