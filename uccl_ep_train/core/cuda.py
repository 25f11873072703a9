"""Buffers of CUDA tensors: availability, and the launch of operations.

`dispatch` and `combine` run on the caller's current stream, their asynchronous forms on a stream of the
engine after what the caller had queued; `wait` lets the caller's current stream wait for them and does not
block the host. A failure that shows later is raised by the next call, and before the next optimizer step.

Operations of a buffer follow each other on the GPU in the order of their calls, on whatever streams. Only in
a CUDA graph their order is that of the streams: who replays one beside other calls has to order both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from uccl_ep_train.common.handle import DispatchHandle
from uccl_ep_train.core.native import load_native
from uccl_ep_train.core.operations import Combined, Dispatched, Launcher, Outputs, Receive, address
from uccl_ep_train.core.pending import Record
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings import env
from uccl_ep_train.settings.config import EpConfig


def built() -> bool:
    """Whether the extension was built with CUDA kernels."""
    return hasattr(load_native(), "GpuEngine")


def ranks_may_share() -> bool:
    """Whether several ranks may use one GPU: NCCL allows it from 2.30 on, where its variable says so."""
    return env.read("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1"


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is captured in a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def choose_device(config: EpConfig) -> torch.device:
    """Where the tensors of a buffer that is made now have to lie: the current GPU, or the CPU.

    Raises `ConfigError` where `config.gpu.backend` names what is not there, and while a graph is captured.
    """
    if config.gpu.backend == "host":
        return torch.device("cpu")
    there = torch.cuda.is_available()
    if there and built():
        device = torch.device("cuda", torch.cuda.current_device())
        if is_capturing(device):
            raise ConfigError(
                "a buffer is made while the current stream is captured in a graph; allowed is before. The "
                "deep_ep module makes one at the first call with other experts, longer rows or low-latency "
                "tokens: make that call once before the capture, on all ranks"
            )
        return device
    if config.gpu.backend == "cuda":
        missing = "torch sees no GPU" if not there else "the extension was built without CUDA kernels"
        raise ConfigError(f"backend = 'cuda': {missing}; allowed here is 'host'")
    if there:
        raise ConfigError(
            "backend = 'auto': there is a GPU, and the extension was built without CUDA kernels; build it "
            "on this machine with nvcc on the PATH or in CUDA_HOME, or with UCCL_EP_CUDA_ARCHS=all, or say "
            "backend = 'host' for CPU tensors"
        )
    return torch.device("cpu")


class _Untracked(Record):
    def keep(self, *tensors: Tensor | None) -> None:
        pass


_UNTRACKED = _Untracked(None)
_NO_OUTPUTS = Outputs(torch.empty(0, device="cpu"), None, None, None, None)


class CudaLauncher(Launcher):
    """Launches on one `GpuEngine`."""

    def __init__(
        self, engine: Any, in_flight: Any, owner: object, device: torch.device, num_experts: int
    ) -> None:
        """num_experts: of this rank"""
        super().__init__(engine, in_flight, owner)
        self._device = device
        self._num_experts = num_experts

    def _stream(self) -> int:
        # What torch.cuda.current_stream() asks, without an object around the answer: 20 us on a slow host.
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    def _track(self, native: Any, aside: bool, *tensors: Tensor | None) -> Record:
        # On the caller's own stream memory is given back in the order of the stream.
        return super()._track(native, aside, *tensors) if aside else _UNTRACKED

    def finish(self, launched: Dispatched | Combined) -> None:
        pass  # The caller's stream has it in its order.

    def _receive(self, native: Any, handle: DispatchHandle, receive: Receive) -> Dispatched:
        if native.counts_known:
            return self._receive_known(native, handle, receive)
        received, guess = _NO_OUTPUTS, 0
        if native.is_guessed:
            try:
                received, guess = receive(native.plan.num_rows), native.plan.num_rows
            except torch.OutOfMemoryError:  # the received rows may be fewer
                native.give_up_guess()
        # What can be done before the counts come is done before; after that the caller waits for every line.
        counts = torch.empty(self._num_experts, dtype=torch.int64, device="cpu")
        launched = Dispatched(native, handle, received, received, counts)
        shrink = received.shrinking()
        num_rows = native.wait_counts(address(counts), partial(shrink, guess))
        if native.placed:
            shrink(num_rows)
            return launched
        # Nothing has been written to these outputs, nor will be: they go before there are others.
        del launched, received, shrink
        handle.keep(None)
        received = receive(num_rows)
        return Dispatched(native, handle, received, received, counts)

    def _receive_known(self, native: Any, handle: DispatchHandle, receive: Receive) -> Dispatched:
        received = receive(handle.num_rows)
        if handle.capacity is None:
            return Dispatched(native, handle, received, received)
        assert handle.storage is not None
        # The counts stay on the device, as part of the plan.
        begin, end = native.plan.counts_begin, native.plan.counts_end
        counts, overflow = handle.storage[begin:end].view(torch.int64), handle.storage[end].view(torch.bool)
        return Dispatched(native, handle, received, received, counts, overflow)

    def _plan_memory(self, native: Any) -> Tensor:
        return torch.empty(native.plan.nbytes, dtype=torch.uint8, device=self._device)

    def _with_dropped(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        return rows  # The kernels skip dropped rows.


def launcher(engine: Any, in_flight: Any, owner: object, device: torch.device, num_experts: int) -> Launcher:
    """For the engine of a rank, whose tensors lie on `device`. num_experts: of this rank"""
    if device.type == "cuda":
        return CudaLauncher(engine, in_flight, owner, device, num_experts)
    return Launcher(engine, in_flight, owner)
