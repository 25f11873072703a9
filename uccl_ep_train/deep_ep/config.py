"""What callers of DeepEP ask before they make a buffer: its sizes, and what its own runtime knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uccl_ep_train.deep_ep.checks import MOST_SMS, check_number
from uccl_ep_train.errors import DtypeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MOST_TOKENS, MOST_TOPK = 4096, 16  # of low latency
DEFAULT_BYTES = 1 << 30  # 8 ranks in a domain: 4,096 tokens of 7168 BF16, with num_worst_tokens
RANKS_OF_NODE = 8
CONFIGURED_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Of a rank's engine: rows of all ranks, and a row for each expert of each token, twice; and the rest.
    By the last term a buffer knows how many experts its bytes were asked for.
    """
    return 2 * 2 * hidden * max_tokens * (num_ranks + MOST_TOPK) + (192 << 20) + num_experts


@dataclass(frozen=True)
class Config:
    """SMs and chunk sizes of DeepEP. Here `num_sms` counts, and chunks are chosen by the engine."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes: what a buffer takes at most, whatever the arguments are."""
        return DEFAULT_BYTES

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: the bytes of get_nvl_buffer_size_hint() are for everything."""
        return 0


def check_config(config: object) -> None:
    """Raises `DtypeError`, `InputError`."""
    if not isinstance(config, Config):
        raise DtypeError(f"config is {type(config).__name__}; allowed are None and a Config")
    check_number("config.num_sms", config.num_sms, 1, MOST_SMS)


class Runtime:
    """What callers ask DeepEP's own runtime."""

    def __init__(self, group: ProcessGroup) -> None:
        self._rank, self._size = group.rank(), group.size()

    def is_available(self) -> bool:
        return True

    def get_num_rdma_ranks(self) -> int:
        return -(-self._size // RANKS_OF_NODE)

    def get_rdma_rank(self) -> int:
        return self._rank // RANKS_OF_NODE
