"""What command-line tools share: bounds of options, files that can be written, and output that ends early.

The functions that argparse calls as `type` raise `ArgumentTypeError`: the tool ends with one line and
status 2, before it does anything.
"""

from __future__ import annotations

import errno
import io
import math
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

READER_LEFT = 128 + 13
"""Exit status where the reader of the output is gone, as shells give it for SIGPIPE."""
_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_MOST_SHOWN = 40


def whole(low: int, high: int | None = None, *, multiple: int = 1) -> Callable[[str], int]:
    """An integer of these bounds, for argparse."""
    bounds = f"at least {low}" if high is None else f"{low} .. {high}"
    allowed = f"a multiple of {multiple}, {bounds}" if multiple > 1 else bounds

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high) or value % multiple:
            raise refused(text, allowed)
        return value

    return parse


def seconds(high: float) -> Callable[[str], float]:
    """A time above 0, for argparse."""
    return _real(lambda value: 0 < value <= high, f"more than 0, at most {high:g}")


def number(low: float, high: float) -> Callable[[str], float]:
    """A number of these bounds, for argparse."""
    return _real(lambda value: low <= value <= high, f"{low:g} .. {high:g}")


def _real(allows: Callable[[float], bool], allowed: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not allows(value):
            raise refused(text, allowed)
        return value

    return parse


def output_file(suffix: str = "", *, makes_folders: bool = False) -> Callable[[str], Path]:
    """A file that can be written, for argparse; in a folder that exists, unless the tool makes folders."""

    def parse(text: str) -> Path:
        path = Path(text)
        if suffix and path.suffix.lower() != suffix:
            raise refused(text, f"a name that ends in {suffix}")
        problem = unwritable(path, makes_folders=makes_folders)
        if problem:
            raise refused(text, f"a file that can be written ({problem})")
        return path

    return parse


def unwritable(path: Path, *, makes_folders: bool = False) -> str:
    """Why a file cannot be written; empty if it can. makes_folders: missing folders above it are made."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # said below
    except (OSError, ValueError) as error:  # a name that is too long, a null byte
        return getattr(error, "strerror", None) or str(error)
    if path.is_dir():
        return "it is a folder"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "it is read-only"
    folder = path.parent
    while makes_folders and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is no folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def refused(text: str, allowed: str) -> ArgumentTypeError:
    """What a function for argparse raises: the value, cut where it is long, and what is allowed."""
    shown = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
    return ArgumentTypeError(f"{shown!r}: allowed is {allowed}")


def run(main: Callable[[], int | None]) -> int:
    """A tool's exit status. Letters that the terminal lacks become question marks. Output that cannot be
    written ends the tool with one line, or with none where its reader left."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            return main() or 0
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            raise
        _discard_output()
        if error.errno == errno.EPIPE:
            return READER_LEFT
        print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """What is buffered is flushed once more at the end of the process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
