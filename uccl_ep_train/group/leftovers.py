"""Shared memory of ranks that were killed while they created a buffer.

The process that creates a named segment locks it (flock). The kernel releases the lock when that process
ends, in whatever way. So an unlocked segment has no owner. A pid would not prove that: it may have been
reused, or belong to another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from uccl_ep_train.common.limits import SHARED_MEMORY

# The name has its creator's pid, for people. Versions without locks put no pid into the name.
_OURS = re.compile(r"uccl_ep(?:\.|_probe_)\d+\.[0-9a-f]{24,32}")


def lock(descriptor: int) -> bool:
    """Whether this process owns the segment now. False: another process does, or `sweep` removed its name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink != 0


def sweep(folder: Path = SHARED_MEMORY) -> None:
    """Removes leftovers of this user's dead processes. Never raises: segments it cannot check stay."""
    for path, _ in _unlocked(folder):
        with contextlib.suppress(OSError):  # another rank was faster
            path.unlink()


def find(folder: Path = SHARED_MEMORY) -> list[str]:
    """The segments that `sweep` would remove."""
    return sorted(str(path) for path, _ in _unlocked(folder))


def _unlocked(folder: Path) -> Iterator[tuple[Path, int]]:
    """Paths, each with a descriptor that holds the lock until the next iteration."""
    try:
        names = [name for name in os.listdir(folder) if _OURS.fullmatch(name)]
    except OSError:
        return
    for name in names:
        try:
            descriptor = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # owned by another user, or gone
            continue
        try:
            info = os.fstat(descriptor)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and lock(descriptor):
                yield folder / name, descriptor
        finally:
            os.close(descriptor)
