"""Many ranks that take the steps of a creation over a real TCPStore, and what they ask of it.

    with Server() as server:
        asked = create(server.port, range(64), 64, StoreTree)

The store serves in a process of its own. Ranks are threads, and share connections, since one takes 0.2 s
where names of hosts are not resolved. `RANKS_OF_A_HOST`
neighbours say that they run on one host. There are no engines: a handle is `HANDLE_BYTES` of nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any
from unittest import mock

from uccl_ep_train import EpConfig
from uccl_ep_train.group import bootstrap as bootstraps
from uccl_ep_train.group.bootstrap import StoreBootstrap, exchange
from uccl_ep_train.group.domains import agree_on_config
from uccl_ep_train.group.patience import Patience
from uccl_ep_train.group.presence import Presence, meet
from uccl_ep_train.group.store_tree import StoreTree, Wait
from uccl_ep_train.group.transport import Place

RANKS_OF_A_HOST = 8
HANDLE_BYTES = 4400
"""Of an RC handle at 256 ranks: 17 bytes for each rank and NIC."""
STEPS = 5
CONNECTIONS = 4
"""Of each process."""
TIMEOUT_S = 200.0


class FlatTree(StoreTree):
    """Every rank reads the frame of every rank. What `StoreTree` is compared with."""

    def collect(
        self, what: str, patience: Patience, look: Callable[[Callable[[], bool]], None]
    ) -> list[bytes]:
        keys = [self._frame_key(rank) for rank in range(self._size)]
        Wait(self, patience, look).until(keys)
        return [frame[len(self._token) :] for frame in self._read(keys)]


class CountingStore:
    """Counts, in `asked`: requests by name, and "keys read", "bytes" of keys and values."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name == "has_extended_api":
            return call

        def counted(*arguments: Any) -> Any:
            found = call(*arguments)
            keys = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
            self.asked[name] += 1
            self.asked["bytes"] += sum(map(len, keys))
            if name in ("get", "multi_get"):
                values = found if name == "multi_get" else [found]
                self.asked["keys read"] += len(keys)
                self.asked["bytes"] += sum(map(len, values))
            if name == "set":
                self.asked["bytes"] += len(arguments[1])
            return found

        return counted


_rank = threading.local()


def _placed(_: Any = None) -> Presence:
    host = f"node{_rank.value // RANKS_OF_A_HOST}"
    return Presence(Place(host, host), _rank.value, f"of {host}")


def take_steps(store: Any, rank: int, size: int) -> list[bytes]:
    """The steps of a creation on the host backend with domains that are set, and without engines."""
    _rank.value = rank
    entry = StoreBootstrap(store, rank, size, name="many", timeout_s=TIMEOUT_S)
    config = EpConfig(num_experts=size, hidden=128, domain_size=RANKS_OF_A_HOST)
    meet(entry)
    agree_on_config(entry, config, lambda: None, lambda said: said)
    handles = exchange(entry, "allocate", lambda: bytes([rank % 251]) * HANDLE_BYTES)
    for what in ("connect", "start"):
        exchange(entry, what, bytes)
    entry.finish()
    return handles


def create(port: int, ranks: Sequence[int], size: int, tree: type[StoreTree]) -> Counter[str]:
    """What these ranks asked of the store. Raises what a rank raised, `AssertionError` for a wrong result."""
    import torch.distributed as dist

    clients = [
        dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False) for _ in range(CONNECTIONS)
    ]
    stores = [CountingStore(clients[rank % CONNECTIONS]) for rank in ranks]
    with (
        mock.patch.object(Presence, "here", _placed),
        mock.patch.object(bootstraps, "StoreTree", tree),
        ThreadPoolExecutor(len(ranks)) as pool,
    ):
        results = list(pool.map(take_steps, stores, ranks, [size] * len(ranks)))
    expected = [bytes([rank % 251]) * HANDLE_BYTES for rank in range(size)]
    assert all(handles == expected for handles in results)
    return sum((store.asked for store in stores), Counter())


def create_in_processes(port: int, processes: int, size: int, tree: type[StoreTree]) -> Counter[str]:
    """As `create` for all ranks, divided among so many processes."""
    share = size // processes
    parts = [range(first, first + share) for first in range(0, size, share)]
    with multiprocessing.get_context("forkserver").Pool(len(parts)) as pool:
        asked: Iterable[Counter[str]] = pool.starmap(create, [(port, part, size, tree) for part in parts])
        return sum(asked, Counter())


def _serve(pipe: Any) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


class Server:
    """A TCPStore in a process of its own; a context manager."""

    def __enter__(self) -> Server:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self.port: int = self._pipe.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join(10)

    def cpu_s(self) -> float:
        """Processor time of the server so far, seconds."""
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
