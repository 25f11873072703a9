"""The floor: plain copies, through shared memory, of the bytes that `uccl_ep` must write."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory

import torch
import torch.distributed as dist

from bench.cases import Case, Traffic
from bench.systems import Sample, System, on_one_host


class Memcpy(System):
    """`memcpy` of as many bytes as dispatch and combine must at least write (`Traffic.least_copies`).

    Every rank copies the same amounts between the same kinds of memory as `uccl_ep`. The copies are long, the
    memory is already mapped, and no rank waits for another.
    """

    name = "memcpy"
    layout = "contiguous"
    end_to_end = False

    def __init__(self, case: Case) -> None:
        if not on_one_host():
            raise RuntimeError("the ranks are on several hosts, which share no memory")
        self.dtype = case.dtype
        self._rank, self._ranks = dist.get_rank(), case.ranks
        per_rank = case.tokens * case.row_bytes
        # A segment has an area for staging and landing, and one for the pieces that all ranks have for its
        # owner. With skewed routing, the copies go over an area several times.
        self._area_bytes = per_rank * max(case.domains, 1)
        self._pieces_bytes = per_rank
        self._shared = _share(self._area_bytes + self._ranks * self._pieces_bytes)
        self._bases = [_address(segment) for segment in self._shared]
        self._private = torch.ones(per_rank * case.topk * 2, dtype=torch.uint8)
        self._plan: dict[str, list[Callable[[], int]]] = {}
        self._bytes: dict[str, int] = {}

    def bind(self, sample: Sample) -> None:
        for op in self.ops:
            least = sample.traffic.least_copies(op, self._rank)
            self._plan[op] = [copy for kind, size in least.items() for copy in self._copies(kind, size)]
            self._bytes[op] = sum(least.values())

    def run(self, op: str) -> None:
        for copy in self._plan[op]:
            copy()

    def wire_bytes(self, op: str, traffic: Traffic) -> tuple[int, int]:
        """Bytes that the busiest rank copies; none go between domains."""
        return max(sum(traffic.least_copies(op, rank).values()) for rank in range(self._ranks)), 0

    def close(self) -> None:
        self._plan.clear()
        dist.barrier()
        for segment in self._shared:
            segment.close()

    def _copies(self, kind: str, size: int) -> list[Callable[[], int]]:
        """Copies of `size` bytes in all, split where the memory on either side ends."""
        copies: list[Callable[[], int]] = []
        private, private_bytes = self._private.data_ptr(), self._private.numel()
        done = 0
        turn = 0
        while done < size:
            peer = self._bases[(self._rank + turn) % self._ranks]
            if kind in ("pieces", "output"):
                owner = self._bases[self._rank] if kind == "output" else peer
                part = turn % self._ranks if kind == "output" else self._rank
                shared = owner + self._area_bytes + part * self._pieces_bytes
                room = self._pieces_bytes
            else:
                shared = peer if kind == "slots" else self._bases[self._rank]
                room = self._area_bytes
            step = min(size - done, room, private_bytes)
            local = private + min(done, private_bytes - step)
            to, source = (local, shared) if kind in ("slots", "output") else (shared, local)
            copies.append(_copy(to, source, step))
            done += step
            turn += 1
        return copies


def _copy(to: int, source: int, size: int) -> Callable[[], int]:
    return lambda: ctypes.memmove(to, source, size)


def _address(segment: shared_memory.SharedMemory) -> int:
    assert segment.buf is not None
    return torch.frombuffer(segment.buf, dtype=torch.uint8).data_ptr()


def _share(size: int) -> list[shared_memory.SharedMemory]:
    """One segment per rank, all on this host: touched by its owner, mapped by all. The names are removed."""
    mine = shared_memory.SharedMemory(create=True, size=size)
    torch.frombuffer(mine.buf, dtype=torch.uint8).fill_(1)
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, mine.name)
    segments = []
    for rank, name in enumerate(names):
        if rank == dist.get_rank():
            segments.append(mine)
            continue
        segments.append(shared_memory.SharedMemory(name=name))
        # Otherwise Python would unlink the segment a second time when this process ends.
        resource_tracker.unregister(segments[-1]._name, "shared_memory")  # type: ignore[attr-defined]
    for segment in segments:
        torch.frombuffer(segment.buf, dtype=torch.uint8).sum()  # maps every page before anything is timed
    dist.barrier()
    mine.unlink()
    return segments
