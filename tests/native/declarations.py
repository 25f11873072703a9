"""Reads the project's own declarations of a library's ABI, as csrc/transport/*/abi.h write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_COMMENT = re.compile(r"//[^\n]*")
_YOUNG = re.compile(r"^[^/\n]*//.*\bsince \d", re.MULTILINE)
_STRUCT = re.compile(r"^(?:struct|union) ((?:ibv|verbs|efadv|fi|fid)(?:_\w+)?) \{", re.MULTILINE)
_ENUM = re.compile(r"^enum (\w+) : [\w ]+\{([^}]*)\}", re.MULTILINE)
_VALUE = re.compile(r"^constexpr \w+ kFi(\w+) = ", re.MULTILINE)
_FUNCTION = re.compile(
    r"^(?:inline )?[\w:]+[\w:* ]*?\**\s\**((?:ibv|fi)_\w+)\([^;{]*\)(?:;| \{)", re.MULTILINE
)
_FUNCTION_TYPE = re.compile(r"^using (\w+) = [\w*]+\(", re.MULTILINE)
_WORD = re.compile(r"(\w+)(?:\[\w+\])*$")


@dataclass
class Declarations:
    fields: dict[str, list[str]] = field(default_factory=dict)  # of a structure; "a.b" in a nested one
    values: dict[str, str] = field(default_factory=dict)  # ours -> the library's
    functions: list[str] = field(default_factory=list)
    function_types: list[str] = field(default_factory=list)
    young: set[str] = field(default_factory=set)  # names that older headers lack: "// since 1.20"


def read(paths: list[Path]) -> Declarations:
    found = Declarations()
    for path in paths:
        text = path.read_text()
        for line in _YOUNG.finditer(text):
            found.young |= set(re.findall(r"\w+", line.group().split("//")[0]))
        code = _COMMENT.sub("", text)
        for match in _STRUCT.finditer(code):
            names = list(_fields(_braced(code, match.end() - 1)))
            found.fields[match.group(1)] = [
                name for name in names if not name.split(".")[-1].startswith("unused")
            ]
        for match in _ENUM.finditer(code):
            found.values |= {name: name for name in re.findall(r"(\w+) =", match.group(2))}
        for match in _VALUE.finditer(code):
            found.values[f"kFi{match.group(1)}"] = _macro(match.group(1))
        found.functions += _FUNCTION.findall(code)
        found.function_types += _FUNCTION_TYPE.findall(code)
    return found


def _macro(camel: str) -> str:
    """ "RemoteCqData" is FI_REMOTE_CQ_DATA."""
    return "FI_" + "_".join(part.upper() for part in re.findall(r"[A-Z][a-z0-9]*", camel))


def _braced(code: str, start: int) -> str:
    """What stands between the brace at `start` and its partner."""
    depth = 0
    for at in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return code[start + 1 : at]
    raise ValueError("a brace without a partner")


def _fields(body: str) -> Iterator[str]:
    at = 0
    while at < len(body):
        end, brace = body.find(";", at), body.find("{", at)
        if end < 0:
            return
        if 0 <= brace < end:
            inner = _braced(body, brace)
            end = body.index(";", brace + len(inner) + 2)
            name = body[brace + len(inner) + 2 : end].strip()
            yield from ([name] if name else [])
            yield from (f"{name}.{part}" if name else part for part in _fields(inner))
        else:
            statement = body[at:end].strip()
            pointer = re.search(r"\(\*(\w+)\)", statement)
            word = pointer or _WORD.search(statement)
            if word is None:
                raise ValueError(f"no declaration: {statement}")
            yield word.group(1)
        at = end + 1
