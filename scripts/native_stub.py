#!/usr/bin/env python3
"""Writes uccl_ep_train/_native.pyi, the types of the compiled core, from the docstrings of its bindings.

    .venv/bin/python scripts/native_stub.py    # after a change of csrc/bindings or of a bound structure

Needs a build with nvcc: otherwise the stub would lack the bindings for GPUs.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "uccl_ep_train" / "_native.pyi"
HEAD = """# Written by scripts/native_stub.py from the bindings; tests/native/test_stub.py compares the two.
from collections.abc import Callable, Mapping, Sequence
"""

# pybind11's name of a type, and Python's.
_TYPES = (
    (re.compile(r'typing\.Annotated\[(.+?), "FixedSize\(\d+\)"\]'), r"\1"),
    (re.compile(r"typing\.SupportsInt(?: \| typing\.SupportsIndex)?"), "int"),
    (re.compile(r"typing\.SupportsFloat(?: \| typing\.SupportsIndex)?"), "float"),
)


def typed(text: str, module: str) -> str:
    for pattern, name in _TYPES:
        text = pattern.sub(name, text)
    return text.replace(f"{module}.", "").replace("collections.abc.", "")


_SIGNATURE = re.compile(r"(?P<name>\w*)\((?P<parameters>.*)\) -> (?P<result>.*)")
_SETTER = re.compile(r"\(\w+: [\w.]+, \w+: (?P<value>.*)\) -> None")
_UNNAMED = re.compile(r"\barg\d+: (?:[^,\[]|\[[^\]]*\])+")


def function(doc: str, module: str) -> str:
    """The declaration of a function from its docstring, whose first line is its signature."""
    match = _SIGNATURE.fullmatch(doc.splitlines()[0])
    if match is None:
        raise ValueError(f"{doc!r} does not begin with a signature")
    parameters = re.sub(r"^self: [\w.]+", "self", match["parameters"])
    # A parameter without a name is positional only.
    unnamed = list(_UNNAMED.finditer(parameters))
    if unnamed:
        end = unnamed[-1].end()
        parameters = f"{parameters[:end]}, /{parameters[end:]}"
    return typed(f"def {match['name']}({parameters}) -> {match['result']}: ...", module)


def attribute(name: str, member: property, module: str) -> Iterator[str]:
    read = typed(str(member.fget.__doc__).strip().rsplit(" -> ", 1)[1], module)
    setter = _SETTER.fullmatch(str(getattr(member.fset, "__doc__", None)).strip())
    written = None if setter is None else typed(setter["value"], module)
    if written == read:
        yield f"{name}: {read}"
        return
    yield "@property"
    yield f"def {name}(self) -> {read}: ..."
    if written is not None:
        yield f"@{name}.setter"
        yield f"def {name}(self, value: {written}) -> None: ..."


def members(bound: type, module: str) -> Iterator[str]:
    for name, member in vars(bound).items():
        if isinstance(member, property):
            yield from attribute(name, member, module)
        elif not name.startswith("_pybind11") and str(member.__doc__).startswith(f"{name}(self: "):
            yield function(str(member.__doc__), module)


def blocks(native: ModuleType) -> dict[str, str]:
    """The declaration of each public name."""
    found = {}
    for name, bound in sorted(vars(native).items()):
        if name.startswith("_"):
            continue
        if isinstance(bound, type):
            bases = ", ".join(base.__name__ for base in bound.__bases__ if base.__module__ == native.__name__)
            lines = [f"class {name}({bases}):" if bases else f"class {name}:"]
            lines += [f"    {line}" for line in members(bound, native.__name__)]
        else:
            lines = [function(str(bound.__doc__), native.__name__)]
        found[name] = "\n".join(lines)
    return found


def stub(native: ModuleType) -> str:
    return HEAD + "".join(f"\n{block}\n" for block in blocks(native).values())


if __name__ == "__main__":
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args()
    sys.path.insert(0, str(ROOT))
    core = importlib.import_module("uccl_ep_train._native")
    if not hasattr(core, "GpuEngine"):
        sys.exit("uccl_ep_train._native was built without nvcc: build it where nvcc is on PATH")
    STUB.write_text(stub(core))
