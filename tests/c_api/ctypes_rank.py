"""An example: a rank of a program in Python that knows the C interface alone, without torch.

`python tests/c_api/ctypes_rank.py LIBRARY` starts two processes. A pipe is their all-gather.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MAGIC, FP32 = 0x75457031, 2
HIDDEN, TOKENS, RANKS = 128, 5, 2

AllGather = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
)
HEAD = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint32)]


class Struct(ctypes.Structure):
    def __init__(self, **fields: object) -> None:
        super().__init__(size=ctypes.sizeof(type(self)), magic=MAGIC, **fields)


class GroupConfig(Struct):
    _fields_ = [
        *HEAD, ("rank", ctypes.c_uint32), ("num_ranks", ctypes.c_uint32), ("num_experts", ctypes.c_uint32),
        ("hidden", ctypes.c_uint32), ("widest", ctypes.c_int), ("on_gpu", ctypes.c_int32),
        ("device", ctypes.c_int32), ("num_sms", ctypes.c_uint32), ("budget_bytes", ctypes.c_uint64),
        ("window_tokens", ctypes.c_uint32),
        ("arrival_timeout_s", ctypes.c_double), ("progress_timeout_s", ctypes.c_double),
        ("transport", ctypes.c_char_p), ("domain_of", ctypes.c_void_p), ("all_gather", AllGather),
        ("all_gather_context", ctypes.c_void_p),
    ]  # fmt: skip


class Routing(Struct):
    _fields_ = [
        *HEAD, ("width", ctypes.c_uint32), ("data", ctypes.c_void_p), ("weights", ctypes.c_void_p),
        ("num_tokens", ctypes.c_uint64), ("is_map", ctypes.c_int32), ("expert_alignment", ctypes.c_uint32),
        ("compact", ctypes.c_int32), ("has_capacity", ctypes.c_int32), ("capacity", ctypes.c_uint64),
        ("max_tokens", ctypes.c_uint64),
    ]  # fmt: skip


class DispatchArgs(Struct):
    _fields_ = [
        *HEAD, ("hidden", ctypes.c_uint32), ("x", ctypes.c_void_p), ("dtype", ctypes.c_int),
        ("wire", ctypes.c_int), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


class Sizes(Struct):
    _fields_ = [
        *HEAD, ("num_local_experts", ctypes.c_uint32), ("num_rows", ctypes.c_uint64),
        ("plan_bytes", ctypes.c_uint64), ("tokens_per_expert", ctypes.POINTER(ctypes.c_uint64)),
        ("tokens_per_expert_exact", ctypes.POINTER(ctypes.c_uint64)),
    ]  # fmt: skip


class Output(Struct):
    _fields_ = [
        *HEAD, ("reserved", ctypes.c_uint32), ("rows", ctypes.c_void_p), ("scales", ctypes.c_void_p),
        ("weights", ctypes.c_void_p), ("row_experts", ctypes.c_void_p), ("plan", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]  # fmt: skip


class CombineArgs(Struct):
    _fields_ = [
        *HEAD, ("hidden", ctypes.c_uint32), ("rows", ctypes.c_void_p), ("dtype", ctypes.c_int),
        ("wire", ctypes.c_int), ("weights", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("weights_out", ctypes.c_void_p), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


def all_gather_over(peer: Connection, rank: int) -> Any:
    def gather(_: object, mine: int, num_bytes: int, gathered: int, step: bytes) -> int:
        own = ctypes.string_at(mine, num_bytes)
        peer.send_bytes(own)
        other = peer.recv_bytes()
        ctypes.memmove(gathered, own + other if rank == 0 else other + own, 2 * num_bytes)
        return 0

    return AllGather(gather)


def rank_main(library: str, rank: int, peer: Connection) -> None:
    core = ctypes.CDLL(library)
    core.uccl_ep_error_text.restype = ctypes.c_char_p
    forever = ctypes.c_uint64(60_000_000)

    def good(status: int) -> None:
        assert status == 0, (status, core.uccl_ep_error_text().decode())

    config = GroupConfig(rank=rank, num_ranks=RANKS, num_experts=RANKS, hidden=HIDDEN, budget_bytes=64 << 20)
    config.all_gather = all_gather_over(peer, rank)
    group, plan, op = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    good(core.uccl_ep_group_create(ctypes.byref(config), ctypes.byref(group)))

    x = (ctypes.c_float * (TOKENS * HIDDEN))(
        *(float(rank * 100 + i // HIDDEN) for i in range(TOKENS * HIDDEN))
    )
    idx = (ctypes.c_int64 * TOKENS)(*(t % RANKS for t in range(TOKENS)))
    routing = Routing(width=1, data=ctypes.addressof(idx), num_tokens=TOKENS)
    good(core.uccl_ep_plan_create(group, ctypes.byref(routing), ctypes.byref(plan)))
    dispatch = DispatchArgs(hidden=HIDDEN, x=ctypes.addressof(x), dtype=FP32)
    good(core.uccl_ep_dispatch(plan, ctypes.byref(dispatch), ctypes.byref(op)))
    sizes = Sizes()
    good(core.uccl_ep_counts(op, forever, ctypes.byref(sizes)))
    mine = [source * 100 + t for source in range(RANKS) for t in range(TOKENS) if t % RANKS == rank]
    assert sizes.num_rows == len(mine)
    rows = (ctypes.c_float * (len(mine) * HIDDEN))()
    output = Output(rows=ctypes.addressof(rows))
    good(core.uccl_ep_complete(op, ctypes.byref(output)))
    good(core.uccl_ep_wait(op, None, forever))
    core.uccl_ep_op_destroy(op)
    assert [rows[r * HIDDEN] for r in range(len(mine))] == mine

    out = (ctypes.c_float * (TOKENS * HIDDEN))()
    combine = CombineArgs(hidden=HIDDEN, rows=ctypes.addressof(rows), dtype=FP32, out=ctypes.addressof(out))
    good(core.uccl_ep_combine(plan, ctypes.byref(combine), ctypes.byref(op)))
    good(core.uccl_ep_wait(op, None, forever))
    core.uccl_ep_op_destroy(op)
    assert list(out) == list(x)  # a token has one expert here
    core.uccl_ep_plan_destroy(plan)
    good(core.uccl_ep_group_destroy(group, 0))


def run_ranks(target: Callable[..., None], *arguments: object) -> None:
    """Processes that run target(LIBRARY, rank, pipe to the other rank, *arguments)."""
    spawn = mp.get_context("spawn")
    ends = spawn.Pipe()
    ranks = [
        spawn.Process(target=target, args=(sys.argv[1], rank, ends[rank], *arguments))
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS


def main() -> None:
    run_ranks(rank_main)
    print(f"{RANKS} ranks, all values are right")


if __name__ == "__main__":
    main()
