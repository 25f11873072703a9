"""Buffers of rank threads that a test drives and ends by hand; `tests/harness.py` would look after them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uccl_ep_train import Buffer, EpConfig, LocalBootstrap, Topology
from uccl_ep_train.group import domains
from uccl_ep_train.group.bootstrap import Bootstrap, exchange

T, H, K, E = 4, 128, 2, 8
SETTINGS: dict[str, Any] = {
    "num_experts": E,
    "hidden": H,
    "dispatch_dtype": "bf16",
    "domain_size": 1,
    "budget_bytes": 4 << 20,
    "arrival_timeout_s": 30.0,
    "progress_timeout_s": 10.0,
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


THREAD = threading.local()
"""`rank`: the one that a thread of `create` makes."""


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returned or raised, run as threads."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def create(num_ranks: int, *per_rank: dict[str, Any], **settings: Any) -> list[Any]:
    """A buffer, or an exception, per rank."""
    ranks = LocalBootstrap.create(num_ranks, timeout_s=30)
    changes = per_rank or ({},) * num_ranks

    def one(bootstrap: LocalBootstrap) -> Buffer:
        THREAD.rank = bootstrap.rank
        config = EpConfig(**{**SETTINGS, **settings, **changes[bootstrap.rank]})
        return Buffer(None, config, bootstrap=bootstrap)

    return together([partial(one, entry) for entry in ranks])


def close(buffers: list[Buffer]) -> None:
    assert together([buffer.close for buffer in buffers]) == [None] * len(buffers)


def inputs(rank: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    idx = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    return torch.randn(T, H, generator=generator).to(dtype), idx, torch.rand(T, K, generator=generator)


def find_domains(bootstrap: Bootstrap) -> Topology:
    """The domains that ranks find, as a creation does."""
    with domains.Handshake() as handshake:
        offers = exchange(bootstrap, "topology: offer", handshake.offer)
        reached = exchange(bootstrap, "topology: reach", lambda: handshake.reach(bootstrap.rank, offers))
    return domains.found(bootstrap.rank, reached)


def dispatch(buffer: Buffer, **arguments: Any) -> Any:
    return buffer.dispatch(*inputs(buffer.rank), **arguments)


def on_all(buffers: list[Buffer], call: Callable[[Buffer], Any]) -> list[Any]:
    return together([partial(call, entry) for entry in buffers])


def shared_memory(pid: int) -> set[str]:
    """Names of a process: other tests may run beside."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"uccl_ep.{pid}.")}
