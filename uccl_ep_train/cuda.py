"""Buffers of CUDA tensors: whether there can be one, and how its operations are launched.

`dispatch` and `combine` run on the caller's current stream, their asynchronous forms on a stream of the
engine after what the caller had queued; `wait` lets the caller's current stream wait for them and does not
block the host. A failure that shows later is raised by the next call, and before the next optimizer step.

Operations of a buffer follow each other on the GPU in the order of their calls, on whatever streams. Only in
a CUDA graph their order is that of the streams: who replays one beside other calls has to order both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uccl_ep_train.config import EpConfig
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.handle import DispatchHandle, RowLayout
from uccl_ep_train.launch import Counts, Launcher, address
from uccl_ep_train.native import load_native


def built() -> bool:
    """Whether the extension was built with nvcc."""
    return hasattr(load_native(), "CudaEngine")


def choose_device(config: EpConfig) -> torch.device:
    """Where the tensors of a buffer that is made now have to lie: the current GPU, or the CPU.

    Raises `ConfigError` where `config.backend` names what is not there.
    """
    if config.backend == "host":
        return torch.device("cpu")
    there = torch.cuda.is_available()
    if there and built():
        return torch.device("cuda", torch.cuda.current_device())
    if config.backend == "cuda":
        missing = "torch sees no GPU" if not there else "the extension was built without nvcc"
        raise ConfigError(f"backend = 'cuda': {missing}; allowed here is 'host'")
    if there:
        raise ConfigError(
            "backend = 'auto': there is a GPU, and the extension was built without nvcc; build it with nvcc "
            "on the PATH or in CUDA_HOME, or say backend = 'host' for CPU tensors"
        )
    return torch.device("cpu")


class CudaLauncher(Launcher):
    """Launches on one `CudaEngine`."""

    def __init__(self, engine: Any, in_flight: Any, owner: object, device: torch.device) -> None:
        super().__init__(engine, in_flight, owner)
        self._device = device

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def wait(self, native: Any) -> None:
        native.wait(self._stream())

    def _num_rows(self, native: Any, rows: RowLayout) -> int:
        """With a capacity the counts stay on the device, and nobody waits for them."""
        if rows.capacity is not None:
            return rows.capacity
        return int(native.plan.num_rows) if native.is_guessed else super()._num_rows(native, rows)

    def _was_guess(self, native: Any) -> bool:
        if not native.is_guessed:
            return False
        native.wait_counts()
        return True

    def _counts(self, native: Any, handle: DispatchHandle) -> Counts:
        if handle.capacity is None:
            return super()._counts(native, handle)
        assert handle.storage is not None
        # They are part of the plan.
        begin, end = native.plan.counts_begin, native.plan.counts_end
        tokens_per_expert = handle.storage[begin:end].view(torch.int64)
        overflow = handle.storage[end].view(torch.bool)
        return Counts(handle, on_device=tokens_per_expert, overflow=overflow)

    def _plan_memory(self, native: Any) -> Tensor:
        return torch.empty(native.plan.nbytes, dtype=torch.uint8, device=self._device)

    def _with_dropped(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        return rows  # The kernels leave out what was dropped.

    def _dispatch(self, args: Any, plan: Any) -> Any:
        return self._engine.dispatch(args, plan, self._stream())

    def _give_output(
        self,
        native: Any,
        storage: Tensor | None,
        rows_RH: Tensor,
        scales: Tensor | None,
        weights_R: Tensor | None,
    ) -> None:
        native.set_output(
            rows=address(rows_RH),
            scales=address(scales),
            values=address(weights_R),
            plan=address(storage),
            stream=self._stream(),
        )

    def _combine(self, args: Any, plan: Any) -> Any:
        return self._engine.combine(args, plan, self._stream())
