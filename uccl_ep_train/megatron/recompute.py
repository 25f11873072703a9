"""Activation recomputation: the second run of a layer's dispatch re-uses the plan of its first run.

A checkpoint calls its function in forward, and again in backward. For that it keeps an object on the autograd
graph: the function (reentrant checkpoints) or a frame (the others). A `Record` of the plans is stored there.
So a recomputation finds the plans of its own first run, and dropping the graph frees them.

Whether a plan is reused follows from the call structure alone, never from local data, so all ranks agree. In
an unknown kind of checkpoint the recomputation makes a new plan, which is correct but slower.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any


class Record:
    """The plans that the first run of one checkpoint made: of each caller in the order of its calls."""

    def __init__(self) -> None:
        # A weak reference: the graph must not keep layers alive.
        self._plans: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def add(self, caller: Any, plan: Any) -> None:
        self._plans.setdefault(caller, []).append(plan)

    def plan(self, caller: Any, number: int) -> Any:
        """Of its call `number`, from 0; None where the first run had fewer."""
        plans = self._plans.get(caller, [])
        return plans[number] if number < len(plans) else None


class _Run:
    """A run of a checkpoint's function that is under way. `again`: its recomputation."""

    def __init__(self, record: Record, again: bool) -> None:
        self.record = record
        self.again = again
        self._calls: dict[Any, int] = {}

    def next_plan(self, caller: Any) -> Any:
        number = self._calls.get(caller, 0)
        self._calls[caller] = number + 1
        return self.record.plan(caller, number)


class _Runs(threading.local):
    """Of this thread, the outermost first. Autograd recomputes in threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_Run] = []


_runs = _Runs()


def saved_plan(caller: Any) -> Any:
    """The plan of the first run for a dispatch that is recomputed now; None: it has to make one."""
    # Each recomputation counts the call, also where an inner one has its plan.
    plans = [run.next_plan(caller) for run in reversed(_runs.stack) if run.again]
    return next((plan for plan in plans if plan is not None), None)


def save_plan(caller: Any, plan: Any) -> None:
    """Keeps the plan of a dispatch for the recomputation of every checkpoint whose first run this is."""
    # A backward pass inside of a first run may recompute what has been run of it so far.
    recomputed = {run.record for run in _runs.stack if run.again}
    for run in _runs.stack:
        if not run.again and run.record not in recomputed:
            run.record.add(caller, plan)


@contextlib.contextmanager
def running(record: Record, *, again: bool) -> Iterator[None]:
    """Dispatches inside belong to a run of the checkpoint that owns `record`."""
    run = _Run(record, again)
    _runs.stack.append(run)
    try:
        yield
    finally:
        # Not always the last: torch leaves a first run that raised when its traceback goes.
        if run in _runs.stack:
            _runs.stack.remove(run)


class Recorded:
    """A checkpoint's function with its record. The first call is the first run, later ones recompute."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._record = Record()
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again, self._ran = self._ran, True
        with running(self._record, again=again):
            return self._function(*args, **kwargs)


def record_checkpoints() -> list[Callable[[], None]]:
    """From now on checkpoints of Megatron, TransformerEngine and torch have records; returns what undoes it.

    Names of the latter two that a release does not have are left out.
    """
    import torch.utils.checkpoint as of_torch
    from megatron.core.tensor_parallel import random as of_megatron

    undo = [
        _record_function(of_megatron.CheckpointFunction, "forward"),
        _record_function(of_megatron.CheckpointWithoutOutput, "checkpoint"),
        _record_function(of_torch.CheckpointFunction, "forward"),
    ]
    # Megatron has imported it, if it is installed.
    of_te: Any = sys.modules.get("transformer_engine.pytorch.distributed")
    if hasattr(of_te, "_CheckpointFunction"):
        undo.append(_record_function(of_te._CheckpointFunction, "forward"))
    undo += [_record_frames(module) for module in (of_torch, of_te) if hasattr(module, "_checkpoint_hook")]
    return undo


def _record_function(owner: Any, name: str) -> Callable[[], None]:
    """Of a method, static or not, whose second argument is the checkpoint's function."""
    stock = owner.__dict__[name]
    function = stock.__func__ if isinstance(stock, staticmethod) else stock

    @functools.wraps(function)
    def method(self_or_ctx: Any, run_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(self_or_ctx, Recorded(run_function), *args, **kwargs)

    setattr(owner, name, staticmethod(method) if isinstance(stock, staticmethod) else method)
    return lambda: setattr(owner, name, stock)


def _record_frames(module: Any) -> Callable[[], None]:
    """Of checkpoints that are not reentrant: a context around the first run, which is given a frame with the
    function that recomputes.
    """
    stock: Any = module._checkpoint_hook

    class RecordingHook(stock):
        def __init__(self, frame: Any, *args: Any) -> None:
            super().__init__(frame, *args)
            record, recompute = Record(), frame.recompute_fn

            def recompute_fn(*args: Any, **kwargs: Any) -> None:
                with running(record, again=True):
                    recompute(*args, **kwargs)

            frame.recompute_fn = recompute_fn
            self._first_run = running(record, again=False)

        def __enter__(self) -> None:
            self._first_run.__enter__()
            super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self._first_run.__exit__(*error)

    module._checkpoint_hook = RecordingHook
    return lambda: setattr(module, "_checkpoint_hook", stock)
