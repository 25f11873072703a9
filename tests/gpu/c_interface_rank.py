"""Two ranks on GPUs, through the C interface alone: `python c_interface_rank.py LIBRARY DOMAINS`

torch gives memory.
"""

from __future__ import annotations

import ctypes
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.c_api import ctypes_rank as c

T, H, K, E, M = 300, 1024, 4, 8, 3
RANKS, LOCAL = 2, E // 2
BF16, FP8 = 1, 4
WAIT = ctypes.c_uint64(60_000_000)


class DispatchArgs(c.DispatchArgs):
    _fields_: ClassVar[Any] = [
        ("scales", ctypes.c_void_p), ("metadata", ctypes.c_void_p), ("num_metadata", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]  # fmt: skip


class Output(c.Output):
    _fields_: ClassVar[Any] = [("metadata", ctypes.c_void_p)]


class Given:
    """One rank's tensors. Sums of these are exact."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        self.x = draw(-8, 9, T, H).to(torch.bfloat16).cuda()
        self.codes = draw(0, 256, T, H).to(torch.uint8).cuda()
        self.scales = draw(1, 99, T, H // 128).float().cuda()
        self.metadata = draw(-(2**31), 2**31, T, M).to(torch.int32).cuda()
        self.idx = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :K].contiguous().cuda()


def expected(rank: int, name: str) -> Tensor:
    """Rows of a rank: by expert, source and token."""
    every = [Given(source) for source in range(RANKS)]
    found = [
        getattr(of, name)[(of.idx == expert).any(1)]
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL)
        for of in every
    ]
    return torch.cat(found)


class Rank:
    def __init__(self, library: str, rank: int, peer: Connection, domains: int) -> None:
        self.core = ctypes.CDLL(library)
        self.core.uccl_ep_error_text.restype = ctypes.c_char_p
        self.rank, self.given = rank, Given(rank)
        self.group, self.plan = ctypes.c_void_p(), ctypes.c_void_p()
        self._kept: Tensor | None = None  # memory of the plan
        self._domain_of = (ctypes.c_int32 * RANKS)(*(r * domains // RANKS for r in range(RANKS)))
        self._config = c.GroupConfig(
            rank=rank, num_ranks=RANKS, num_experts=E, hidden=2 * H, on_gpu=1, device=rank, num_sms=16,
            budget_bytes=256 << 20, domain_of=ctypes.addressof(self._domain_of),
        )  # fmt: skip
        self._config.transport = b"loop" if domains > 1 else None
        self._config.all_gather = c.all_gather_over(peer, rank)
        self.good(self.core.uccl_ep_group_create(ctypes.byref(self._config), ctypes.byref(self.group)))

    def good(self, status: int) -> None:
        assert status == 0, (status, self.core.uccl_ep_error_text().decode())

    def route(self, **options: Any) -> None:
        """Gives the plan a new routing."""
        self.core.uccl_ep_plan_destroy(self.plan)
        self.plan, self._kept = ctypes.c_void_p(), None
        routing = c.Routing(width=K, data=self.given.idx.data_ptr(), num_tokens=T, **options)
        self.good(self.core.uccl_ep_plan_create(self.group, ctypes.byref(routing), ctypes.byref(self.plan)))

    def dispatch(self, x: Tensor, dtype: int, **options: Any) -> dict[str, Tensor]:
        stream = torch.cuda.current_stream().cuda_stream
        args = DispatchArgs(hidden=H, x=x.data_ptr(), dtype=dtype, stream=stream, num_metadata=M,
                            metadata=self.given.metadata.data_ptr(), **options)  # fmt: skip
        op, sizes = ctypes.c_void_p(), c.Sizes()
        self.good(self.core.uccl_ep_dispatch(self.plan, ctypes.byref(args), ctypes.byref(op)))
        self.good(self.core.uccl_ep_counts(op, WAIT, ctypes.byref(sizes)))
        num_rows = int(sizes.num_rows)
        got = {
            "rows": x.new_empty(num_rows, H),
            "scales": torch.empty(num_rows, H // 128, device="cuda"),
            "metadata": torch.empty(num_rows, M, dtype=torch.int32, device="cuda"),
        }
        if self._kept is None:
            self._kept = torch.empty(int(sizes.plan_bytes), dtype=torch.uint8, device="cuda")
        output = Output(rows=got["rows"].data_ptr(), metadata=got["metadata"].data_ptr(), stream=stream,
                        plan=self._kept.data_ptr(),
                        scales=got["scales"].data_ptr() if dtype == FP8 else None)  # fmt: skip
        self.good(self.core.uccl_ep_complete(op, ctypes.byref(output)))
        self.wait(op, stream)
        return got

    def combine(self, rows: Tensor) -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        out = torch.empty(T, H, dtype=torch.bfloat16, device="cuda")
        args = c.CombineArgs(hidden=H, rows=rows.data_ptr(), dtype=BF16, out=out.data_ptr(), stream=stream)
        op = ctypes.c_void_p()
        self.good(self.core.uccl_ep_combine(self.plan, ctypes.byref(args), ctypes.byref(op)))
        self.wait(op, stream)
        return out

    def wait(self, op: ctypes.c_void_p, stream: int) -> None:
        self.good(self.core.uccl_ep_wait(op, ctypes.c_void_p(stream), WAIT))
        torch.cuda.synchronize()
        self.core.uccl_ep_op_destroy(op)

    def close(self) -> None:
        self.core.uccl_ep_plan_destroy(self.plan)
        self.good(self.core.uccl_ep_group_destroy(self.group, 0))


def rank_main(library: str, rank: int, peer: Connection, domains: int) -> None:
    torch.cuda.set_device(rank)
    r = Rank(library, rank, peer, domains)
    given = r.given
    rows, words = expected(rank, "x"), expected(rank, "metadata")
    codes, scales = expected(rank, "codes"), expected(rank, "scales")
    r.route()
    for _ in range(3):  # a new plan, then a known one
        got = r.dispatch(given.x, BF16)
        assert torch.equal(got["rows"], rows) and torch.equal(got["metadata"], words)
        assert torch.equal(r.combine(got["rows"]), given.x * K)
    got = r.dispatch(given.codes, FP8, scales=given.scales.data_ptr())
    assert torch.equal(got["rows"], codes) and torch.equal(got["scales"], scales)
    r.route(has_capacity=1, capacity=len(rows) + 50)  # the host waits for no counts
    got = r.dispatch(given.x, BF16)
    assert len(got["rows"]) == len(rows) + 50 and torch.equal(got["rows"][: len(rows)], rows)
    assert torch.equal(got["metadata"][: len(rows)], words)
    assert torch.equal(r.combine(got["rows"]), given.x * K)
    r.close()


def main() -> None:
    c.run_ranks(rank_main, int(sys.argv[2]))
    print(f"{RANKS} ranks on GPUs, all values are right")


if __name__ == "__main__":
    main()
