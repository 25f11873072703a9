"""Lets stock Megatron-Core run on a CPU-only torch over gloo. Nothing in Megatron's files is changed.

`install()` does nothing where torch sees a GPU. Each shim is one function named after the CUDA-ism it
stands in for, and its docstring names the Megatron code that needs it; `ALL` is the whole list.
Call it once per process before anything of Megatron is imported, because Megatron keeps some of these names.
Two of them stand in for TransformerEngine rather than for CUDA: see `install_for_local_spec()`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import library as torch_library

from uccl_ep_train.errors import ConfigError

CPU = torch.device("cpu")
_installed: list[str] = []
_libraries: list[torch_library.Library] = []  # a registration lives as long as its object


class _NoStream:
    """Stands for torch.cuda.Stream and Event: there is one in-order "stream", so every method is a no-op."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record_event(self, *_args: Any) -> _NoStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0

    def _nothing(self, *_args: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    def __hash__(self) -> int:
        return 0


def _current_device() -> None:
    """torch.cuda.current_device(): tensor-parallel mappings, gradient buffers, rotary embedding."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]


def _streams() -> None:
    """torch.cuda.Stream and friends: constructor and side stream of the stock all-to-all dispatcher."""
    the_stream = _NoStream()
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *_a: the_stream
    cuda.stream = lambda _s: contextlib.nullcontext()
    cuda.synchronize = lambda *_a: None
    torch.Tensor.record_stream = lambda self, _s: None  # type: ignore[method-assign, assignment]


def _nvtx() -> None:
    """NVTX ranges: the 1F1B expert-parallel overlap schedule pushes them unconditionally."""
    nvtx: Any = torch.cuda.nvtx
    nvtx.range_push = nvtx.range_pop = lambda *_a, **_k: 0
    nvtx.range = lambda *_a, **_k: contextlib.nullcontext()


def _compile() -> None:
    """torch.compile (Megatron's jit_fuser): minutes of C++ compiler for small functions on a CPU."""

    def keep(function: Any = None, **_kwargs: Any) -> Any:
        return keep if function is None else function

    torch.compile = keep  # type: ignore[assignment]


def _tensor_cuda() -> None:
    """Tensor.cuda() and Module.cuda(): identity."""
    torch.Tensor.cuda = lambda self, *_a, **_k: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_a, **_k: self  # type: ignore[method-assign]


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


def _device_literal() -> None:
    """device="cuda" literals in factory calls: pipeline schedules, loss scalers, gradient norm."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = _on_cpu(kwargs["device"])
            return factory(*args, **kwargs)

        return wrapper

    names = "tensor as_tensor zeros ones empty full arange rand randn randint zeros_like empty_like ones_like"
    for name in names.split():
        setattr(torch, name, on_cpu(getattr(torch, name)))
    stock_to = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return stock_to(self, *(_on_cpu(a) for a in args), **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]


class _TypedTensor(type):
    """Metaclass of the stand-ins for torch.cuda.FloatTensor and so on, used in isinstance()."""

    dtype: torch.dtype

    def __instancecheck__(cls, obj: object) -> bool:
        return isinstance(obj, torch.Tensor) and obj.dtype == cls.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        return torch.tensor(args[0] if args else [], dtype=cls.dtype)


def _tensor_type() -> None:
    """Tensor.type() and torch.cuda.FloatTensor: optimizer, gradient clipping, Float16Module."""
    dtypes = {
        "FloatTensor": torch.float32, "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16,
        "IntTensor": torch.int32, "LongTensor": torch.int64,
    }  # fmt: skip
    for name, dtype in dtypes.items():
        setattr(torch.cuda, name, _TypedTensor(name, (), {"dtype": dtype}))
    stock_type = torch.Tensor.type
    as_cuda = {f"torch.{n}": f"torch.cuda.{n}" for n in ("FloatTensor", "HalfTensor", "BFloat16Tensor")}

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = stock_type(self, *args, **kwargs)
        return result if args or kwargs else as_cuda.get(result, result)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def _typing_override() -> None:
    """megatron.training from 0.17 on is written for Python 3.12 but needs only this name of it."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]


class _NeedsTriton:
    """Replaces a Triton kernel in a process without Triton: it can be imported, but its use raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError(f"Megatron's {self._name} needs Triton, which is not installed")

    __getitem__ = __call__  # kernel[grid]


def _triton_kernels() -> None:
    """From 0.17 on all of Megatron imports the kernels of moe/ops/paged_stash.py, whether used or not.

    A CPU-only torch comes without Triton. The stand-in is for this one module: one for `triton` itself would
    make other modules of Megatron and torch believe that they can use it.
    """
    if importlib.util.find_spec("triton") is not None:
        return

    def needs_triton(name: str) -> _NeedsTriton:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NeedsTriton(name)

    kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    kernels.__getattr__ = needs_triton  # type: ignore[method-assign]
    sys.modules[kernels.__name__] = kernels


def _gpu_packages() -> None:
    """TransformerEngine and apex: Megatron takes a norm, the optimizer and the router's product from them.

    They need a GPU, so Megatron must not find them even if they are installed.
    """
    for name in ("transformer_engine", "apex"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # importing it raises ImportError


def _rng() -> None:
    """The model-parallel RNG tracker saves and restores torch.cuda's RNG state."""
    import megatron.core.tensor_parallel.random as mcore_random

    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *_a, **_k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    mcore_random._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)


def _te_names() -> None:
    """megatron-core 0.16.1 without TransformerEngine: its names are undefined in moe_utils, and latent
    attention believes that it is there."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False

    for name in (
        "te_general_gemm", "fused_permute", "fused_permute_with_probs", "fused_unpermute",
        "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs",
        "fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
    ):  # fmt: skip
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)


def _splits() -> None:
    """maybe_move_tensor_to_cpu(as_numpy=True) passes CPU tensors through, so split sizes stay tensors."""
    from megatron.core.transformer.moe import token_dispatcher

    stock = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy() if as_numpy else tensor
        return stock(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _sp_norm() -> None:
    """WrappedTorchNorm refuses sequence parallelism, which only needs its parameters to be marked."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def new(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> torch.nn.Module:
        norm_type = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_type(hidden_size, eps=eps).to(config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)


def _uneven_collectives() -> None:
    """gloo has no uneven all_gather or reduce_scatter: stock all-to-all dispatcher with expert TP."""
    stock_gather, stock_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(
        outs: list[torch.Tensor], x: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = [o.shape[0] for o in outs]
        if len(set(rows)) <= 1:
            return stock_gather(outs, x, group=group, async_op=async_op)
        padded = x.new_zeros((max(rows), *x.shape[1:]))
        padded[: x.shape[0]] = x
        gathered = [torch.empty_like(padded) for _ in rows]
        stock_gather(gathered, padded, group=group)
        for out, part in zip(outs, gathered, strict=True):
            out.copy_(part[: out.shape[0]])
        return None

    def reduce_scatter(
        out: torch.Tensor, ins: list[torch.Tensor], op: Any = dist.ReduceOp.SUM,
        group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        rows = [i.shape[0] for i in ins]
        if len(set(rows)) <= 1:
            return stock_scatter(out, ins, op=op, group=group, async_op=async_op)
        total = torch.cat(list(ins)).contiguous()
        dist.all_reduce(total, op=op, group=group)
        out.copy_(torch.split(total, rows)[dist.get_rank(group)])
        return None

    dist.all_gather = all_gather  # type: ignore[assignment]
    dist.reduce_scatter = reduce_scatter  # type: ignore[assignment]


def _bf16_matmul() -> None:
    """BF16 products on a CPU without BF16 instructions: 60 times faster as FP32 products rounded once.

    This is also what a GPU computes (BF16 factors, FP32 accumulation, one rounding).
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return

    def rounded(name: str) -> Callable[..., torch.Tensor]:
        # The `out` overload is a separate registration, so calling it does not recurse.
        op_out = getattr(torch.ops.aten, name).out

        def product(*args: torch.Tensor, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
            a, b = args[-2:]
            scalars = {"beta": beta, "alpha": alpha} if len(args) == 3 else {}
            low = a.dtype == torch.bfloat16
            wide = [t.float() for t in args] if low else list(args)
            out = wide[-1].new_empty((*a.shape[:-1], b.shape[-1]))
            op_out(*wide, **scalars, out=out)
            return out.to(torch.bfloat16) if low else out

        return product

    library = torch_library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is overridden: that is the intention
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            library.impl(name, rounded(name), "CPU")
    _libraries.append(library)


ALL: tuple[Callable[[], None], ...] = (
    _current_device, _streams, _nvtx, _compile, _tensor_cuda, _device_literal, _tensor_type,
    _typing_override, _triton_kernels, _gpu_packages, _rng, _te_names, _splits, _sp_norm, _uneven_collectives,
    _bf16_matmul,
)  # fmt: skip


# On GPUs, too, where a model is built from Megatron's local layer spec.
LOCAL_SPEC: tuple[Callable[[], None], ...] = (_te_names, _sp_norm)


def install() -> list[str]:
    """Installs every shim when torch sees no GPU; returns the names of those in place (none with a GPU)."""
    if torch.cuda.is_available() or _installed:
        return list(_installed)
    for shim in ALL:
        shim()
        _installed.append(shim.__name__.lstrip("_"))
    return list(_installed)


def install_for_local_spec() -> None:
    """After `install()`, on any device: what Megatron's own layers lack where those of TransformerEngine are
    not there or not used."""
    for shim in LOCAL_SPEC:
        shim()  # once more changes nothing


def install_training() -> None:
    """For `megatron.training` scripts, after `install()`: one device per rank, and no demand for CUDA."""
    from megatron.training import initialize, training

    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1  # without a device no process groups are created
    cuda.set_device = lambda *_a: None
    cuda.get_device_properties = lambda *_a: types.SimpleNamespace(major=0, minor=0)  # asked with TP
    if hasattr(initialize, "fused_kernels"):
        initialize.fused_kernels.load = lambda _args: None  # would look for nvcc
    without_cuda = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    initialize.initialize_megatron = training.initialize_megatron = without_cuda
