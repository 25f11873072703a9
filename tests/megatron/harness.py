"""Megatron ranks that stay alive over many tests, because importing Megatron takes seconds.

    def measure(rank: int, size: int) -> Any: ...         # in tests/megatron/size_case.py
    results = ranks.run("size_case.measure", size=3)      # what each rank returned, by rank

A case is named, not passed, so that the test process need not import Megatron.

One server process imports Megatron once and forks the ranks. They form a group whose store lives in the test
process. A case that raises on any rank ends all of them; the next case gets fresh ones.

Each rank has a GPU where there are enough (`recipes.plan.devices.lacking`), else all work on the CPU; a case
asks `devices.own()` where its tensors belong.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import importlib.util
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from typing import Any

NUM_RANKS = 4
START_TIMEOUT_S = 120.0  # four ranks on two busy cores
STORE_TIMEOUT = datetime.timedelta(seconds=60)


def megatron_is_installed() -> bool:
    """Without importing it, which on a CPU works in the ranks only, after the shims."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # not even the namespace `megatron`
        return False


class CaseError(AssertionError):
    """A case raised on some rank. `errors`: exception class names by rank, "" where it returned."""

    def __init__(self, text: str, errors: list[str]) -> None:
        super().__init__(text)
        self.errors = errors


class MegatronRanks:
    """Runs cases on every rank; starts the ranks when needed and again after a failure."""

    def __init__(self, num_ranks: int = NUM_RANKS) -> None:
        from recipes.plan import devices

        self.num_ranks = num_ranks
        self.device = "cpu" if devices.lacking(num_ranks) else "cuda"
        self._server: Any = None
        self._pipes: list[Connection] = []
        self._store: Any = None

    def run(self, name: str, *, timeout_s: float = 300.0, **kwargs: Any) -> list[Any]:
        """Results by rank. Raises CaseError with the traces of the ranks that raised or did not finish."""
        started = self._start()
        for pipe in self._pipes:
            pipe.send((name, kwargs))
        deadline = time.monotonic() + timeout_s + (START_TIMEOUT_S if started else 0.0)
        replies = self._replies(deadline)
        failed = {rank: reply[1:] for rank, reply in enumerate(replies) if reply[0] != "returned"}
        if failed:
            self.close()
            names = [failed[rank][0] if rank in failed else "" for rank in range(self.num_ranks)]
            texts: dict[str, list[int]] = {}
            for rank, (_, text) in failed.items():
                texts.setdefault(text, []).append(rank)  # usually all ranks say the same
            raise CaseError("\n".join(f"ranks {who}: {text}" for text, who in texts.items()), names)
        return [reply[1] for reply in replies]

    @property
    def store_port(self) -> int:
        """Of the store of the group, for groups that a case makes itself; started if need be."""
        self._start()
        return int(self._store.port)

    def _replies(self, deadline: float) -> list[tuple[Any, ...]]:
        replies: dict[int, tuple[Any, ...]] = {}
        while len(replies) < self.num_ranks:
            open_pipes = {p: r for r, p in enumerate(self._pipes) if r not in replies}
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    replies[open_pipes[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    replies[open_pipes[pipe]] = ("ended", "Died", "the process ended")
                if replies[open_pipes[pipe]][0] != "returned":
                    # The others may wait for it in a collective until gloo's deadline.
                    deadline = min(deadline, time.monotonic() + 25.0)
            if not ready:
                for rank in open_pipes.values():
                    replies[rank] = ("late", "Late", "did not finish in time")
        return [replies[rank] for rank in range(self.num_ranks)]

    def _start(self) -> bool:
        if self._server is not None:
            return False
        import torch.distributed as dist

        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(self.num_ranks)]
        self._pipes = [ours for ours, _ in pairs]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._server = context.Process(
            target=_serve, args=(self.device, self._store.port, [theirs for _, theirs in pairs])
        )
        self._server.start()
        for _, theirs in pairs:
            theirs.close()
        return True

    def close(self) -> None:
        """Kills the ranks."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.pid, signal.SIGKILL)  # its children die with it
            self._server.join(10.0)
        for pipe in self._pipes:
            pipe.close()
        self._server, self._pipes, self._store = None, [], None


def _die_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)


def _serve(device: str, port: int, pipes: list[Connection]) -> None:
    """Imports Megatron without starting a thread, then forks the ranks."""
    _die_with_parent()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # For GPUs after the fork: who has as much as looked for one has children that cannot use theirs.
    backend = _import_megatron(device, 0) if device == "cpu" else ""
    children = []
    for rank in range(len(pipes)):
        child = os.fork()
        if child == 0:
            _die_with_parent()
            for other, pipe in enumerate(pipes):
                if other != rank:
                    pipe.close()
            _rank_loop(backend or _import_megatron(device, rank), rank, port, pipes)
        children.append(child)
    for pipe in pipes:
        pipe.close()
    for child in children:
        os.waitpid(child, 0)


def _import_megatron(device: str, rank: int) -> str:
    """And before it what depends on the device; returns the backend for torch.distributed."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    if device == "cuda":
        os.environ["UCCL_EP_BACKEND"] = "cuda"
        # Compiling Megatron's small functions anew for each case takes longer than the cases.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # TransformerEngine lets the router's FP32 products be TF32 ones, in which one ulp may become 2^-11.
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        os.environ.pop("CUDA_MODULE_LOADING", None)  # set for ranks that are threads
    import torch

    from recipes.plan import devices
    from uccl_ep_train.megatron import cpu_shims

    torch.set_num_threads(1)
    backend = devices.join(device, rank)
    cpu_shims.install()
    cpu_shims.install_for_local_spec()
    importlib.import_module("tests.megatron.training_case")
    return backend


def _rank_loop(backend: str, rank: int, port: int, pipes: list[Connection]) -> None:
    import torch.distributed as dist

    pipe = pipes[rank]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=STORE_TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=len(pipes), timeout=STORE_TIMEOUT)
    while True:
        try:
            name, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            module, function = name.split(".")
            case = getattr(importlib.import_module(f"tests.megatron.{module}"), function)
            pipe.send(("returned", case(rank, **kwargs)))
        except BaseException as error:
            pipe.send(("raised", type(error).__name__, traceback.format_exc()))
