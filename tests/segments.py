"""Shared memory of this host that a test may have left behind, beside tests of other processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

GRACE_S = 5.0


def segments() -> set[str]:
    """Names of our shared memory, less what other processes map at this moment and this one does not."""
    names = {name for name in os.listdir("/dev/shm") if name.startswith("uccl_ep")}
    if not names:
        return names
    own = Path("/proc/self/maps").read_text()
    foreign: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:  # the process has ended, or is not ours to look at
            continue
        foreign |= {name for name in names if name in text and name not in own}
    return names - foreign


def left_behind(before: set[str]) -> set[str]:
    """What is there and was not `before`. What others have not mapped yet, or are about to remove, passes."""
    until = time.monotonic() + GRACE_S
    while (new := segments() - before) and time.monotonic() < until:
        time.sleep(0.05)
    return new
