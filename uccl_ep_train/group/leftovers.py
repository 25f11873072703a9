"""Shared memory that ranks left behind which were killed while they made a buffer.

A named segment is locked (flock) by the process that made it, and the kernel lets go of the lock when that
process ends, however it ends. So an unlocked one is nobody's. That holds where a pid would mislead: one that
another process has got since, and processes of another container, whose pids mean nothing here.
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

# With the maker's pid, for people. Versions that did not lock put no pid into the name.
_OURS = re.compile(r"uccl_ep(?:\.|_probe_)\d+\.[0-9a-f]{24,32}")


def lock(descriptor: int) -> bool:
    """Whether this process has the segment now. False: another one has, or `sweep` has removed its name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink != 0


def sweep(folder: Path = SHARED_MEMORY) -> None:
    """Removes what dead processes of this user left. Never raises: who cannot look leaves it to others."""
    for path, _ in _unlocked(folder):
        with contextlib.suppress(OSError):  # another rank was faster
            path.unlink()


def find(folder: Path = SHARED_MEMORY) -> list[str]:
    """What `sweep` would remove."""
    return sorted(str(path) for path, _ in _unlocked(folder))


def _unlocked(folder: Path) -> Iterator[tuple[Path, int]]:
    """Paths, with a descriptor that holds the lock until the next is asked for."""
    try:
        names = [name for name in os.listdir(folder) if _OURS.fullmatch(name)]
    except OSError:
        return
    for name in names:
        try:
            descriptor = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # another user's, or gone
            continue
        try:
            info = os.fstat(descriptor)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and lock(descriptor):
                yield folder / name, descriptor
        finally:
            os.close(descriptor)
