"""Functions of C++ sources, as far as rules need them: by their braces, for no compiler reads all sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.architecture.tree import cpp_code

_NO_FUNCTION = re.compile(r"\b(?:if|for|while|switch|catch|requires|namespace|enum)\b")
_BEFORE_NAME = re.compile(r"\b(?:__launch_bounds__|__align__|alignas|decltype|noexcept|explicit)\s*$")


class CppFunction(NamedTuple):
    """A function or lambda with a body. line: of its name; lines: of its body."""

    name: str
    line: int
    lines: int
    parameters: int


def cpp_functions(text: str) -> Iterator[CppFunction]:
    """Those of a source, in the order of their ends."""
    code = cpp_code(text)
    opened: list[int] = []
    for brace in re.finditer(r"[{}]", code):
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened:
            start = opened.pop()
            begin = max(code.rfind(mark, 0, start) for mark in ";{}") + 1
            function = _named(code[begin:start])
            if function is not None:
                name, at, parameters = function
                line = code.count("\n", 0, begin + at) + 1
                yield CppFunction(name, line, code.count("\n", start, brace.end()) - 1, parameters)


def _named(head: str) -> tuple[str, int, int] | None:
    """(name, where it stands, number of parameters) of the function that begins so; None if it is none."""
    head = re.sub(r"^[ \t]*#.*$", lambda line: " " * len(line.group()), head, flags=re.MULTILINE)
    depth, unclosed = 0, 0
    for i in range(len(head) - 1, -1, -1):  # what encloses a lambda is not its head
        depth += {")": 1, "(": -1}.get(head[i], 0)
        if depth < 0:
            depth, unclosed = 0, i + 1
            break
    at = unclosed
    while (opening := head.find("(", at)) >= 0:
        closing = _closing(head, opening)
        before = head[unclosed:opening]
        if not _BEFORE_NAME.search(before):
            if _NO_FUNCTION.search(before) or not re.search(r"[\w\]>=+*!<-]\s*$|\)\s*$", before):
                return None
            name = re.search(r"(\w+)\s*$", before)
            place = opening - len(name.group()) if name else opening
            return (name.group(1) if name else "lambda"), place, _count(head[opening + 1 : closing])
        at = closing + 1
    return None


def _closing(head: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(head)):
        depth += {"(": 1, ")": -1}.get(head[i], 0)
        if depth == 0:
            return i
    return len(head)


def _count(parameters: str) -> int:
    """Commas between them, not within: those of templates and defaults do not count."""
    flat = re.sub(r"\s+", " ", parameters).strip()
    for brackets in (r"<[^<>()]*>", r"\([^()]*\)", r"\[[^\[\]]*\]", r"<[^<>()]*>", r"\([^()]*\)"):
        flat = re.sub(brackets, "", flat)
    return flat.count(",") + 1 if flat else 0
