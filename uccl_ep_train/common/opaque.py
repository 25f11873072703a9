"""Keeps torch.compile out of this package's calls.

If Dynamo compiled inside a call, the other ranks of the group would wait. So a compiled region ends before
the call (a graph break) and resumes after it. Neither the call nor its callees are traced or compiled. With
`fullgraph=True` torch raises `Unsupported`.

`torch.compiler.disable` does this by a wrapper that takes 0.8 us a call, and imports torch._dynamo, which
takes seconds. What it tells Dynamo is told here without either.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

Call = TypeVar("Call", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

_REASON = "it works with other ranks, which would wait for the compiler"


def opaque(function: Call) -> Call:
    """The plain function, which Dynamo neither inlines nor compiles, nor what it calls."""
    if not _skip_frames(function):
        function = _disabled_when_needed(function)
    # What a trace that comes to a call of it looks for.
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
    return function


def opaque_methods(owner: Class) -> Class:
    """The class, all of whose own methods and properties are opaque."""
    for name, entry in list(vars(owner).items()):
        if isinstance(entry, FunctionType):
            setattr(owner, name, opaque(entry))
        elif isinstance(entry, property) and entry.fget is not None:
            setattr(owner, name, entry.getter(opaque(entry.fget)))
        elif isinstance(entry, functools.cached_property):
            entry.func = opaque(entry.func)
    return owner


def _skip_frames(function: Any) -> bool:
    """Lets Dynamo's frame evaluator pass by the function's frames and those of what it calls."""
    evaluator: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(evaluator, "_FrameExecStrategy"):  # an older torch
        return False
    skip = evaluator._FrameAction.SKIP
    evaluator.set_code_exec_strategy(function.__code__, evaluator._FrameExecStrategy(skip, skip))
    return True


def _disabled_when_needed(function: Call) -> Call:
    """As `torch.compiler.disable` makes it, once somebody has imported Dynamo."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call  # type: ignore[return-value]
