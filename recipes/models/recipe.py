"""What a recipe that `training/loop.py` trains may set. A recipe is a function without logic that returns one
`Recipe`.

Recipes that Megatron-LM trains return a `Pretraining`, see layout.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.models.architecture import Model
from recipes.models.layout import Layout

DEVICES = ("auto", "cpu", "cuda")
DISPATCHERS = ("uccl_ep", "alltoall", "allgather", "flex-deepep", "flex-hybridep")
ABLATIONS = ("none", "zero_experts", "zero_prob_grad", "wrong_scale")

FP8_WIDTH = 16  # rows and columns of TransformerEngine's FP8 products are multiples of it


class RecipeError(ValueError):
    """Settings that do not go together."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run; the launcher's options override a few of them. Raises RecipeError."""

    name: str
    device: str  # one of DEVICES; "auto": see `devices.place`

    # Ranks: every rank is data parallel for attention and holds num_experts / num_ranks experts.
    num_ranks: int
    domain_size: int  # consecutive ranks that share memory; rows for other domains go through the proxies
    threads_per_rank: int  # intra-op threads of torch

    model: Model
    sequence_length: int  # bytes
    # True: TransformerEngine's layers and grouped products on GPUs. False, or on CPUs: Megatron's local spec.
    transformer_engine: bool = False
    fp8_recipe: str | None = None  # of TransformerEngine's products; None: BF16

    # Steps
    micro_batch_size: int  # sequences of a rank in a forward pass
    num_microbatches: int  # forward passes of a rank in a step
    num_steps: int
    lr: float
    min_lr: float
    warmup_steps: int
    adam_beta2: float
    weight_decay: float
    clip_grad: float  # norm
    seed: int
    distributed_optimizer: bool = False  # its checkpoints are not supported: checkpoint_interval = 0
    optimizer_bytes: int = 12  # per parameter: FP32 master weight and moments; 8: BF16 moments, on GPUs

    # Dispatcher
    token_dispatcher: str  # one of DISPATCHERS
    dispatch_dtype: str  # "fp8" | "bf16", only for uccl_ep
    grad_dtype: str  # "bf16" | "fp8", only for uccl_ep
    budget_bytes: int  # memory of the dispatcher per rank
    ablate: str  # one of ABLATIONS, the negative controls

    # Reporting
    val_interval: int  # steps
    val_batches: int  # forward passes of a rank in a validation
    checkpoint_interval: int  # steps; 0: none are written, and a stopped run begins anew
    val_fraction: float  # of the text's files

    hardware: str = ""  # node type that it is sized for, see hardware.py; empty: any machine

    def __post_init__(self) -> None:
        num_experts = self.model.num_experts
        divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        if self.num_ranks not in divisors:
            raise RecipeError(
                f"num_ranks = {self.num_ranks}: {num_experts} experts have to be spread evenly; "
                f"allowed is one of {divisors}"
            )
        if not 1 <= self.domain_size <= self.num_ranks:
            raise RecipeError(
                f"domain_size = {self.domain_size}: allowed is 1 .. {self.num_ranks}, the number of ranks"
            )

        dense = self.model.first_dense_layers
        if self.model.num_layers <= dense:
            raise RecipeError(
                f"num_layers = {self.model.num_layers}: {dense} of {self.name} are dense; "
                f"allowed is at least {dense + 1}"
            )
        for name in ("hidden_size", "expert_ffn_size"):
            width = getattr(self.model, name)
            if self.fp8_recipe and width % FP8_WIDTH:
                raise RecipeError(
                    f"{name} = {width}: FP8 products of TransformerEngine need a multiple of {FP8_WIDTH}"
                )
        if self.hardware and self.device == "cpu":
            raise RecipeError(f"device = cpu: {self.name} is sized for GPUs of {self.hardware}")
        if self.distributed_optimizer and self.checkpoint_interval:
            raise RecipeError(
                f"checkpoint_interval = {self.checkpoint_interval}: allowed with distributed_optimizer is 0"
            )

    @property
    def layout(self) -> Layout:
        """For the dry run: all ranks in one expert parallel group."""
        return Layout(
            num_ranks=self.num_ranks,
            ep=self.num_ranks,
            sequence_length=self.sequence_length,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.num_ranks * self.micro_batch_size * self.num_microbatches,
            fp8_recipe=self.fp8_recipe,
            distributed_optimizer=self.distributed_optimizer,
            optimizer_bytes=self.optimizer_bytes,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.num_ranks * self.micro_batch_size * self.num_microbatches * self.sequence_length
