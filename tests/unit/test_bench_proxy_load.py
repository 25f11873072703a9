"""The proxies' processor time, of which `bench/proxy_load.py` tells."""

from __future__ import annotations

import ctypes
import threading
import time

from bench.proxy_load import THREAD, thread_seconds

PR_SET_NAME = 15
BUSY_S = 0.3


def spin_as(name: str) -> float:
    """What is counted of a thread of that name, seconds, while it lives."""
    counted = 0.0

    def spin() -> None:
        nonlocal counted
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        before = thread_seconds()
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            pass
        counted = thread_seconds() - before

    # A thread that was joined may still be listed, and gone a moment later.
    until = time.monotonic() + 10.0
    while thread_seconds() > 0 and time.monotonic() < until:
        time.sleep(0.01)
    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()
    return counted


def test_time_of_proxies_is_counted_and_of_no_other_thread() -> None:
    assert BUSY_S - 0.03 <= spin_as(THREAD) <= BUSY_S + 0.1
    assert spin_as("somebody else") == 0
