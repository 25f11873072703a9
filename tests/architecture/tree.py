"""What the architecture checks share: the files of the project, and C++ without its comments and strings."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPP = (".h", ".hpp", ".cc", ".cpp", ".cu", ".cuh")
GENERATED = {
    ".git",
    ".venv",
    "build",
    "runs",
    "__pycache__",
    ".hypothesis",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
}

Check = Callable[[Path], list[str]]
"""Takes the root of a tree and returns one line per violation: `path:line: what`."""


def project_files(root: Path, *suffixes: str, under: str = "") -> list[Path]:
    """Files of the project with one of the suffixes (none given: all), sorted; without what git ignores."""
    listed = _git_files(root) if (root / ".git").exists() else None
    if listed is None:
        listed = [path for path in root.rglob("*") if path.is_file()]
        listed = [path for path in listed if not GENERATED & set(path.relative_to(root).parts)]
    base = root / under
    return sorted(
        path
        for path in listed
        if path.is_relative_to(base) and path.is_file() and (not suffixes or path.suffix in suffixes)
    )


def _git_files(root: Path) -> list[Path] | None:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        return None
    return [root / name for name in names if name]


_NO_CODE = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])'""", re.DOTALL | re.VERBOSE
)


def cpp_code(text: str) -> str:
    """C++ with comments, strings and characters blanked; lines keep their numbers."""
    return _NO_CODE.sub(lambda match: "\n" * match.group().count("\n") or " ", text)


def matches(root: Path, path: Path, text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """`path:line: matched text` for each match."""
    for match in pattern.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield f"{path.relative_to(root)}:{line}: {match.group().strip()}"


def plant(root: Path, files: dict[str, str]) -> Path:
    """Writes a tree for a negative control; returns its root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
