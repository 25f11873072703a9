"""What a recipe may set. A recipe is a function that returns one `Recipe`; it holds no logic."""

from __future__ import annotations

from dataclasses import dataclass

DEVICES = ("auto", "cpu", "cuda")
DISPATCHERS = ("uccl_ep", "alltoall", "allgather")
ABLATIONS = ("none", "zero_experts", "zero_prob_grad", "wrong_scale")
VOCAB_SIZE = 257  # the 256 byte values and one end-of-document token
PADDED_VOCAB_SIZE = 272  # a multiple of 16, as vectorised matrix products like it


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

    # Model (GPTModel with the local spec; every layer is an MoE layer, no shared expert)
    num_layers: int
    hidden_size: int  # a multiple of 128, the FP8 block
    num_heads: int
    expert_ffn_size: int
    num_experts: int
    topk: int
    aux_loss_coeff: float
    sequence_length: int  # bytes

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

    # Dispatcher
    token_dispatcher: str  # one of DISPATCHERS
    dispatch_dtype: str  # "fp8" | "bf16", only for uccl_ep
    grad_dtype: str  # "bf16" | "fp8", only for uccl_ep
    budget_bytes: int  # memory of the dispatcher per rank
    ablate: str  # one of ABLATIONS, the negative controls

    # Reporting
    val_interval: int  # steps
    val_batches: int  # forward passes of a rank in a validation
    checkpoint_interval: int  # steps
    val_fraction: float  # of the text's files

    def __post_init__(self) -> None:
        divisors = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
        if self.num_ranks not in divisors:
            raise RecipeError(
                f"num_ranks = {self.num_ranks}: {self.num_experts} experts have to be spread evenly; "
                f"allowed is one of {divisors}"
            )
        if not 1 <= self.domain_size <= self.num_ranks:
            raise RecipeError(
                f"domain_size = {self.domain_size}: allowed is 1 .. {self.num_ranks}, the number of ranks"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.num_ranks * self.micro_batch_size * self.num_microbatches * self.sequence_length
