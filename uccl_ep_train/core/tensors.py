"""What every tensor of a call has to be, whatever its shape means."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from uccl_ep_train.errors import DeviceError, DtypeError, InputError, ShapeError

_RECORDERS = ("FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode")  # imported by few programs

_NO_WRAPPER = Tensor.__torch_dispatch__


def check_mode() -> None:
    """Nobody records calls of torch, or runs them on fakes: what an engine does would be missing there."""
    if torch._C._get_tracing_state() is not None:
        raise InputError("torch.jit.trace records this call; allowed is a call outside of it")
    if torch._C._len_torch_dispatch_stack() == 0:
        return
    for mode in _get_current_dispatch_mode_stack():
        if type(mode).__name__ in _RECORDERS:
            raise InputError(
                f"{type(mode).__name__} records calls, or runs them on fakes; "
                "allowed is a call outside of it, or one of `Operators`"
            )


def check_tensor(name: str, tensor: Tensor, dims: int, device: torch.device) -> None:
    """A plain, contiguous tensor of so many dimensions, there. Raises `InputError`."""
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{name} is {type(tensor).__name__}; allowed is a torch.Tensor")
    if tensor.device != device:
        raise DeviceError(f"{name} is on {tensor.device}; allowed is {device}, where this buffer works")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InputError(f"{name} is {tensor.layout}; allowed is a plain dense tensor")
    if tensor.dim() != dims:
        raise ShapeError(f"{name} has {tensor.dim()} dimensions; allowed is {dims}")
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{name} is not contiguous (strides {tuple(tensor.stride())}); pass {name}.contiguous()"
        )
    if _has_tangent(tensor):
        raise InputError(f"{name} has a tangent of forward-mode autograd; allowed is reverse mode")
    if tensor.is_neg():
        raise InputError(f"{name} is a view with other signs than its memory; pass {name}.resolve_neg()")
    if not has_memory(tensor):
        if is_under_way(tensor):
            raise InputError(f"{name} is the result of a collective under way; pass {name}.wait()")
        raise InputError(
            f"{name}, a {type(tensor).__name__}, has no memory of its own (it is a wrapper, freed, or fake); "
            "allowed is a plain tensor"
        )


def _has_tangent(tensor: Tensor) -> bool:
    """Of forward-mode autograd, which would be lost."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def is_under_way(tensor: Tensor) -> bool:
    """Of torch's functional collectives: an `AsyncCollectiveTensor`, whose class few programs import."""
    return hasattr(tensor, "trigger_wait")


def has_memory(tensor: Tensor) -> bool:
    """Its elements lie where it says; if it has none, those of others like it would."""
    try:
        if tensor.data_ptr() != 0:
            return True
        if tensor.numel() > 0:
            return False
        return type(tensor).__torch_dispatch__ is _NO_WRAPPER or tensor.new_empty(1).data_ptr() != 0
    except (RuntimeError, TypeError):  # of torch.func, for one
        return False


_TAKEN = ("FakeTensor", "FunctionalTensor")  # by torch's tracers


def check_operand(name: str, tensor: Tensor) -> None:
    """Of an operator: torch would ask classes that wrap tensors, which know none. Raises `InputError`."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise InputError(
            f"{name} is {tensor.layout}{', nested' * tensor.is_nested}; allowed is a plain dense tensor"
        )
    kind = type(tensor)
    has_own = kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    if has_own and not (kind.__name__ in _TAKEN or is_under_way(tensor) or has_memory(tensor)):
        raise InputError(f"{name}, a {kind.__name__}, has no memory of its own; allowed is a plain tensor")


def refused_transform() -> str:
    """Why not, in a transform of torch.func that would get zeros or torch's error; else nothing."""
    functorch = torch._C._functorch
    keys = [transform.key() for transform in functorch.get_interpreter_stack() or ()]
    if functorch.TransformType.Jvp in keys:
        return "jvp and jacfwd of torch.func are forward mode; allowed is reverse mode"
    if functorch.TransformType.Grad in keys:
        return "grad, vjp and jacrev of torch.func do not know operators; allowed is torch.autograd.grad"
    return ""


vars(refused_transform)["_dynamo_marked_constant"] = True  # as `assume_constant_result` tells Dynamo


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
