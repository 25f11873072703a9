"""The configuration of MoE layers whose expert TP x EP group is one rank: they have Megatron's all-to-all."""

from __future__ import annotations

import functools
from typing import Any

_NAME = "moe_token_dispatcher_type"


def as_alltoall(config: Any) -> Any:
    """A view of a TransformerConfig that names the all-to-all dispatcher.

    Megatron's experts read that name: for a flex dispatcher they leave the padding of FP8 products to it. All
    other fields are those of `config`, also when either is changed later. `config` keeps its own name.
    """
    stock: Any = type(config)
    view = object.__new__(_view_class(stock))
    view.original = config
    view.__dict__ = config.__dict__
    return view


@functools.cache
def _view_class(stock: Any) -> Any:
    class View(stock):
        __slots__ = ("original",)

        def __reduce__(self) -> tuple[Any, ...]:
            return as_alltoall, (self.original,)  # a copy is a view of the copied config

    View.__name__, View.__qualname__ = stock.__name__, stock.__qualname__
    setattr(View, _NAME, property(_name, _set_name))
    return View


def _name(view: Any) -> str:
    return "alltoall"


def _set_name(view: Any, name: str) -> None:
    """`dataclasses.replace` makes a new object and sets all fields."""
    view.__dict__[_NAME] = name
