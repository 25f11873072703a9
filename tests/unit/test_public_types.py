"""What `uccl_ep_train` and `uccl_ep_train.megatron` export says its types, and none of them is `Any`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest

import uccl_ep_train
from tests.megatron.harness import megatron_is_installed

ANY = re.compile(r"\bAny\b")
OPERATORS = {"__init__", "__call__", "__enter__", "__exit__", "__getitem__"}
UNTYPED = {"self", "cls"}


def of_function(function: Any, name: str) -> Iterator[str]:
    """`name(parameter)` of each parameter that has no type or `Any`; `name()` for such a result."""
    signature = inspect.signature(function)
    types = {
        f"{name}({parameter.name})": parameter.annotation
        for parameter in signature.parameters.values()
        if parameter.name not in UNTYPED
    }
    if not name.endswith(".__init__"):
        types[f"{name}()"] = signature.return_annotation
    for place, annotation in types.items():
        if annotation is inspect.Signature.empty or ANY.search(str(annotation)):
            yield place


def of_member(member: Any, name: str, module: str) -> Iterator[str]:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, cached_property):
        member = member.func
    elif isinstance(member, staticmethod | classmethod):
        member = member.__func__
    # Of our own: typing gives a `Protocol` an __init__.
    if inspect.isfunction(member) and member.__module__ == module:
        yield from of_function(member, name)


def of_class(exported: type) -> Iterator[str]:
    """Methods, properties and fields, those of bases in our package included."""
    for owner in exported.__mro__:
        if owner.__module__.split(".")[0] not in (uccl_ep_train.__name__, __name__.split(".")[0]):
            continue
        for name, member in vars(owner).items():
            if name in OPERATORS or not name.startswith("_"):
                yield from of_member(member, f"{owner.__name__}.{name}", owner.__module__)
        for name, annotation in vars(owner).get("__annotations__", {}).items():
            if not name.startswith("_") and ANY.search(str(annotation)):
                yield f"{owner.__name__}.{name}"


def untyped(module: Any) -> list[str]:
    found: list[str] = []
    for name in module.__all__:
        exported = getattr(module, name)
        if isinstance(exported, type):
            found += of_class(exported)
        elif callable(exported):
            found += of_function(exported, name)
    return found


def test_the_public_surface_has_types() -> None:
    assert untyped(uccl_ep_train) == []


def test_the_public_surface_of_the_plug_in_has_types() -> None:
    if not megatron_is_installed():
        pytest.skip("megatron-core cannot be imported")
    assert untyped(importlib.import_module("uccl_ep_train.megatron")) == []
    plugin = importlib.import_module("uccl_ep_train.megatron.plugin")
    functions = {name: entry for name, entry in vars(plugin).items() if inspect.isfunction(entry)}
    own = {name for name, entry in functions.items() if entry.__module__ == plugin.__name__}
    public = {name for name in own if not name.startswith("_")}
    assert {"enable", "disable", "verify", "describe", "buffers"} <= public
    assert [place for name in public for place in of_function(functions[name], name)] == []


class Loose:
    """Of each kind one without a type or with `Any`; the rest is in order."""

    rows: Any
    pairs: dict[str, Any] | None
    good: int
    _own: Any

    def __init__(self, group: Any, size: int) -> None:
        self.size = size

    def method(self, x: int, *rest, **options: Any) -> int:  # type: ignore[no-untyped-def]
        return x

    def result(self) -> list[Any]:
        return []

    def silent(self):  # type: ignore[no-untyped-def]
        return None

    @property
    def shown(self) -> Any:
        return None

    @cached_property
    def kept(self) -> Any:
        return None

    @classmethod
    def made(cls, of: Any) -> Loose:
        return cls(of, 1)

    def _private(self, x: Any) -> Any:
        return x


class Looser(Loose):
    pass


def test_what_has_no_type_is_found() -> None:
    found = {
        "Loose.rows", "Loose.pairs", "Loose.__init__(group)", "Loose.method(rest)", "Loose.method(options)",
        "Loose.result()", "Loose.silent()", "Loose.shown()", "Loose.kept()", "Loose.made(of)",
    }  # fmt: skip
    assert set(of_class(Loose)) == set(of_class(Looser)) == found
