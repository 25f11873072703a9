"""Objects of C++ sources, kept under build/ from one session to the next."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
FLAGS = ("-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-ffp-contract=off")
SANITIZERS = {"memory": "address,undefined", "thread": "thread"}

OBJECTS = ROOT / "build" / "native_claims"
OBJECTS_KEPT_SECONDS = 86400.0  # since they were last used


def run(command: Sequence[str | Path], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
    )


def compiler(name: str = "g++") -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the path")
    return found


def options_for(sanitizer: str) -> tuple[str, ...]:
    return (*FLAGS, f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all")


@cache
def headers_text(folders: tuple[Path, ...]) -> bytes:
    return b"".join(path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.h")))


def compiled(source: Path, options: Sequence[str], includes: tuple[Path, ...], name: str = "g++") -> Path:
    """The object of a source. Named by all that it depends on, so never stale."""
    text = b"\0".join(
        [name.encode(), " ".join(options).encode(), headers_text(includes), source.read_bytes()]
    )
    obj = OBJECTS / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:24]}.o"
    if obj.exists():
        obj.touch()
    else:
        OBJECTS.mkdir(parents=True, exist_ok=True)
        unfinished = obj.with_suffix(f".{os.getpid()}")
        paths = [f"-I{folder}" for folder in includes]
        result = run([compiler(name), *options, *paths, "-c", source, "-o", unfinished], 600)
        assert result.returncode == 0, result.stderr
        unfinished.rename(obj)  # another session may be making the same one
    return obj


def forget_old_objects() -> None:
    if not OBJECTS.exists():
        return
    for obj in OBJECTS.iterdir():
        if obj.stat().st_mtime < time.time() - OBJECTS_KEPT_SECONDS:
            obj.unlink(missing_ok=True)
