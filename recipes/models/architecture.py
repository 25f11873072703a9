"""A model's published architecture, whoever trains it. Sizes are in elements unless stated otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

BYTE_VOCAB_SIZE = 257  # the 256 byte values and one end-of-document token
PADDED_BYTE_VOCAB_SIZE = 272  # a multiple of 16, which suits vectorised matrix products


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention. Per head unless said otherwise."""

    q_rank: int | None  # of all heads together; None: queries are not compressed
    kv_rank: int  # of all heads together
    nope_dim: int  # of queries and keys, the part without positions
    rope_dim: int  # the part with positions; the keys of all heads share one
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Stretched rotary positions."""

    factor: float
    original_length: int  # tokens
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token's experts are chosen."""

    score: str = "softmax"  # | "sigmoid"
    pre_softmax: bool = False  # softmax over all experts, before the top-k; else over the chosen ones
    num_groups: int | None = None  # experts in so many groups ...
    group_topk: int | None = None  # ... of which a token may go to so many
    scaling_factor: float | None = None  # of the chosen experts' probabilities
    expert_bias: bool = False  # balanced by a bias on the scores that no gradient changes
    balancing: str = "aux_loss"  # | "seq_aux_loss" | "none"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT with mixture-of-experts layers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    expert_ffn_size: int
    num_experts: int
    topk: int
    aux_loss_coeff: float

    vocab_size: int = PADDED_BYTE_VOCAB_SIZE  # rows of the embedding, padding included
    tied_embeddings: bool = True
    first_dense_layers: int = 0  # without experts; the others are MoE layers
    dense_ffn_size: int | None = None
    shared_ffn_size: int | None = None  # of all shared experts together
    router: Router = field(default_factory=Router)

    latent: Latent | None = None  # None: ordinary attention
    num_query_groups: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    qk_norm: bool = False
    window: int | None = None  # tokens that a token sees, itself included, in every second layer
    sinks: bool = False  # a learnt logit per head joins the softmax
    rope_theta: int = 10000
    yarn: Yarn | None = None

    activation: str = "gelu"  # | "swiglu" | "quick_geglu"
    glu_clamp: float | None = None
    glu_offset: float = 0.0
    bias: bool = False  # of all linear layers and of the router
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    mtp_layers: int = 0  # layers that predict further tokens, each with its own MoE layer
    tokenizer: str = ""  # its published name; empty: bytes

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.first_dense_layers
