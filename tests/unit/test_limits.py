"""What a host does not give a process is a typed error that names the limit, its value and the remedy.

Each limit is really met, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.machine import lacks_tcp
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.common import limits
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.group.bootstrap import TorchBootstrap

ALONE = """
import os, resource, sys
from uccl_ep_train import Buffer, EpConfig, LocalBootstrap

class Limited(LocalBootstrap):
    def all_gather(self, payload, what):
        answers = super().all_gather(payload, what)
        if what == {step!r}:
            limit()
        return answers

def taken():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

{limit}

(bootstrap,) = Limited.create(1, timeout_s=30)
config = EpConfig(num_experts=2, hidden=128, budget_bytes={budget}, backend="host")
try:
    Buffer(None, config, bootstrap=bootstrap).close()
except Exception as error:
    print(type(error).__name__, error)
else:
    print("made")
"""
NO_LIMIT = "def limit(): pass"
OUT_OF_THREADS = {
    "ulimit -u": (
        "def limit():\n"
        "    if os.getuid() == 0: os.setuid(65534)\n"
        "    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))"
    ),
    "ulimit -v": (
        "def limit(): resource.setrlimit(resource.RLIMIT_AS, (taken() + (1 << 20), resource.RLIM_INFINITY))"
    ),
}


def alone(limit: str, step: str = "connect", budget: int = 4 << 20, prefix: tuple[str, ...] = ()) -> str:
    """What the creation of a buffer said in a process of its own, limited after a step."""
    program = ALONE.format(limit=limit, step=step, budget=budget)
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stderr)  # SIGBUS, for one, would be -7
    return done.stdout.strip()


@pytest.mark.parametrize("which", OUT_OF_THREADS)
def test_no_thread_is_an_error_that_names_the_limit(which: str) -> None:
    said = alone(OUT_OF_THREADS[which])
    assert said.startswith("ConfigError no thread for the worker: Resource temporarily unavailable: "), said
    assert f"{which} allows " in said
    if which == "ulimit -u":
        assert " 1 processes and threads, " in said


def test_no_address_space_for_the_memory_of_a_buffer_names_that_limit() -> None:
    said = alone(OUT_OF_THREADS["ulimit -v"], "configuration", 256 << 20)
    assert said.startswith("ConfigError mapping "), said
    assert "ulimit -v allows " in said and " are wanted" in said


def test_memory_beyond_the_largest_file_names_that_limit_and_sends_no_signal() -> None:
    limit = (
        "import signal\n"
        "def limit():\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # as in a program that is no Python\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"
    )
    said = alone(limit, "configuration")
    assert said.startswith("ConfigError sizing to ") and " bytes /dev/shm/uccl_ep." in said, said
    assert "ulimit -f allows 64 KiB for a file, and shared memory is one" in said
    assert "ulimit -f unlimited" in said and " are wanted" in said


def test_without_a_limit_the_buffer_is_made() -> None:
    """Control of the tests above."""
    assert alone(NO_LIMIT) == "made"


def test_a_cgroup_that_allows_no_more_threads_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pids.max").write_text("64\n")
    (tmp_path / "pids.current").write_text("64\n")
    monkeypatch.setattr(limits, "cgroup_folders", lambda: [tmp_path])
    assert f"the cgroup's pids.max is 64, 64 run ({tmp_path}; Docker: --pids-limit)" in limits.threads()
    (tmp_path / "pids.max").write_text("max\n")
    assert "cgroup" not in limits.threads()


def test_a_thread_of_python_that_cannot_start_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(ConfigError, match="no thread for check a: can't start new thread: "):
        limits.start_thread(threading.Thread(name="check a"))


# ------------------------------------------------------------------------------------------ descriptors


class Filling(TorchBootstrap):
    """Leaves few descriptors, or none, once it is past a step."""

    step_name = ""
    left = 0

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        answers = super().all_gather(payload, what)
        if what == self.step_name:
            take_all_descriptors(self.left)
        return answers


def take_all_descriptors(left: int) -> None:
    import resource

    last = -1
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 64, used + 64))
    try:
        while True:
            last = os.open("/dev/null", os.O_RDONLY)
    except OSError:
        os.closerange(last + 1 - left, last + 1)


def make(rank: Rank, step: str, left: int = 0, **network: Any) -> int:
    bootstrap = Filling(rank.group, timeout_s=60.0)
    bootstrap.left = left
    bootstrap.step_name = step if rank.rank == 1 else ""
    config = EpConfig(num_experts=4, hidden=128, budget_bytes=4 << 20, backend="host", **network)
    with Buffer(None, config, bootstrap=bootstrap) as buffer:
        return buffer.topology.num_domains


@pytest.mark.parametrize("step", ["processes", "configuration"])
def test_too_few_descriptors_are_said_and_never_split_a_domain(step: str) -> None:
    """Whatever has to be opened next: a library, an own segment, a neighbour's, the memory of the buffer."""
    with ProcessRanks(2, make, (step,)) as ranks:
        other, short = ranks.outcomes(timeout_s=60).values()
    assert short.error == "ConfigError", short
    assert "ulimit -n allows " in short.message and " are open; a buffer needs " in short.message
    assert other.error == "PeerFailed" and "rank 1 failed with ConfigError" in other.message
    assert "ulimit -n" in other.message


def make_over_tcp(rank: Rank, left: int) -> int:
    return make(rank, "configuration", left, transport="ofi", ofi_provider="tcp", domain_size=1)


def test_too_few_descriptors_for_the_endpoint_of_a_network_are_said() -> None:
    if lacks_tcp():
        pytest.skip(lacks_tcp())
    with ProcessRanks(2, make_over_tcp, (6,)) as ranks:
        other, short = ranks.outcomes(timeout_s=60).values()
    assert short.error == "ConfigError" and "Too many open files: ulimit -n allows " in short.message, short
    assert short.message.startswith("ofi: ")
    assert other.error == "PeerFailed" and "rank 1 failed with ConfigError" in other.message


def test_with_descriptors_the_two_are_one_domain() -> None:
    """Control of the test above."""
    with ProcessRanks(2, make, ("none",)) as ranks:
        assert ranks.results() == [1, 1]


# ---------------------------------------------------------------------------------------- shared memory


def with_memory(options: str, command: str = "true") -> tuple[str, ...]:
    """A prefix that runs a program with a /dev/shm mounted so, after a shell command."""
    prefix = ("unshare", "-m") if os.getuid() == 0 else ("unshare", "-rm")
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    if shutil.which("unshare") is None or subprocess.run([*prefix, "sh", "-c", mount]).returncode != 0:
        pytest.skip("this system lets nobody mount a /dev/shm of his own")
    return (*prefix, "sh", "-c", f'{mount} && {command} && exec "$@"', "sh")


def test_a_shared_memory_that_is_too_small_is_said_and_is_no_bus_error() -> None:
    said = alone(NO_LIMIT, budget=8 << 20, prefix=with_memory("size=1m"))
    assert said.startswith("ConfigError reserving "), said
    assert "/dev/shm has " in said and " of 1048576 bytes free, " in said and "--shm-size" in said
    wanted = int(said.partition("reserving ")[2].split()[0])
    assert f"bytes free, {wanted} are wanted" in said and wanted > 1 << 20


def test_a_shared_memory_that_is_full_is_said_of_the_first_segment() -> None:
    prefix = with_memory("size=1m", "! cat /dev/zero 2>&1 >/dev/shm/full | grep -q nothing")
    said = alone(NO_LIMIT, prefix=prefix)
    assert said.startswith("ConfigError reserving "), said
    assert "/dev/shm has 0 of 1048576 bytes free" in said and "--shm-size" in said


@pytest.mark.parametrize(
    ("options", "why", "remedy"),
    [
        ("ro", "Read-only file system: /dev/shm is mounted read-only", "mount -o remount,rw /dev/shm"),
        ("nr_inodes=1", "/dev/shm has no file left of its 1 inodes", "mount -o remount,nr_inodes="),
    ],
)
def test_a_shared_memory_that_takes_no_file_is_said_with_what_mends_it(
    options: str, why: str, remedy: str
) -> None:
    said = alone(NO_LIMIT, prefix=with_memory(options))
    assert said.startswith("ConfigError creating /dev/shm/uccl_ep."), said
    assert why in said and remedy in said and "shm-size" not in said


@pytest.mark.parametrize(
    ("where", "why", "remedy"),
    [
        ("none", "No such file or directory", "Mount it: mount -t tmpfs"),
        ("file", "is no folder", "Remove it"),
    ],
)
def test_without_a_folder_of_shared_memory_it_is_to_be_mounted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, why: str, remedy: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path / where)
    said = limits.shared_memory(0)
    assert str(tmp_path / where) in said and why in said and remedy in said and "Docker: --ipc=" in said


def test_a_shared_memory_without_the_right_to_write_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path)
    assert limits.shared_memory_fault() is None
    monkeypatch.setattr(limits.os, "access", lambda *_, **__: False)
    said = limits.shared_memory(0)
    assert f"may not write to {tmp_path} (mode 755, of user {os.getuid()})" in said and "chmod 1777" in said
