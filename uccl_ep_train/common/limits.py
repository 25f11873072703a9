"""Limits of the host in words, for errors of a process that exceeds them."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from uccl_ep_train.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = -1
_PROC = Path("/proc")
_MOST_COUNTED = 1 << 16
"""Descriptors that are looked at, to count those in use."""


def refusal(limit: str, text: str, wanted_bytes: int = 0) -> ConfigError:
    """The error for what could not be had: `text`, the limits in question and what raises them. The native
    core calls it, too.

    limit         "threads" | "descriptors" | "shared_memory" | "address_space" | "file_size"
    wanted_bytes  of memory; 0: not known
    """
    said = {
        "threads": threads,
        "descriptors": descriptors,
        "shared_memory": lambda: shared_memory(wanted_bytes),
        "file_size": lambda: f"{file_size()}{_wanted(wanted_bytes)}",
        "address_space": lambda: f"{address_space() or 'the host has no memory left'}{_wanted(wanted_bytes)}",
    }
    return ConfigError(f"{text}: {said[limit]()}")


_LIMIT_OF = {
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
    errno.ENOSPC: "shared_memory",
    errno.ENOMEM: "address_space",
}


def refusal_of(error: OSError, text: str, wanted_bytes: int = 0) -> ConfigError | None:
    """As `refusal`, where a system call failed for want of something; None: it failed for another reason."""
    limit = _LIMIT_OF.get(error.errno or 0)
    return None if limit is None else refusal(limit, f"{text}: {error.strerror}", wanted_bytes)


def require_descriptor(text: str) -> None:
    """Raises `ConfigError` if no further file can be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        refused = refusal_of(error, text)
        if refused is not None:
            raise refused from error


def start_thread(thread: threading.Thread) -> None:
    """`thread.start()`. Raises `ConfigError` naming the limits if the host allows no further thread."""
    try:
        thread.start()
    except RuntimeError as error:
        raise refusal("threads", f"no thread for {thread.name}: {error}") from error


def threads() -> str:
    """What limits the number of threads."""
    said = []
    most = limit_of(resource.RLIMIT_NPROC)
    if most != UNLIMITED:
        user = os.getuid()
        said.append(f"ulimit -u allows user {user} {most} processes and threads, {_threads_of(user)} run")
    for folder in cgroup_folders():
        most = number_in(folder / "pids.max")
        if most != UNLIMITED:
            used = number_in(folder / "pids.current")
            said.append(f"the cgroup's pids.max is {most}, {used} run ({folder}; Docker: --pids-limit)")
            break
    said.append(address_space())
    if not any(said):
        most = number_in(_PROC / "sys/kernel/threads-max")
        said.append(f"no limit of the process is set; kernel.threads-max is {most}")
    return "; ".join(text for text in said if text)


def descriptors() -> str:
    """What limits the number of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    looked_at = _MOST_COUNTED if soft == resource.RLIM_INFINITY else min(soft, _MOST_COUNTED)
    used = sum(1 for descriptor in range(looked_at) if _is_open(descriptor))
    return (
        f"ulimit -n allows {soft} open files (hard limit {hard}), {used} are open; a buffer needs 8, and one "
        "for each other rank of the host. Raise it: ulimit -n 65536, Docker: --ulimit nofile=65536"
    )


def shared_memory(wanted_bytes: int) -> str:
    """What there is of shared memory."""
    if fault := shared_memory_fault():
        return f"{fault.text}{_wanted(wanted_bytes)}. {fault.remedy}"
    info = os.statvfs(SHARED_MEMORY)
    free, size = info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize
    return (
        f"{SHARED_MEMORY} has {free} of {size} bytes free{_wanted(wanted_bytes)}. Start the container with a "
        f"larger --shm-size, or: mount -o remount,size=64G {SHARED_MEMORY}. `memory_plan` says what a buffer "
        "takes, a lower budget_bytes makes it less"
    )


class Fault(NamedTuple):
    """What is wrong on this host, and what mends it."""

    text: str
    remedy: str


def shared_memory_fault() -> Fault | None:
    """Why no segment can be made, whatever its size; None: nothing speaks against it."""
    mount = f"mount -t tmpfs -o size=64G tmpfs {SHARED_MEMORY}. Docker: --ipc=private, not none"
    try:
        space, folder = os.statvfs(SHARED_MEMORY), os.stat(SHARED_MEMORY)
    except OSError as error:
        return Fault(f"{SHARED_MEMORY}: {error.strerror}", f"Mount it: {mount}")
    if not stat.S_ISDIR(folder.st_mode):
        return Fault(f"{SHARED_MEMORY} is no folder", f"Remove it, make a folder and mount it: {mount}")
    if space.f_flag & os.ST_RDONLY:
        container = f"Kubernetes: an emptyDir with medium: Memory at {SHARED_MEMORY}, without readOnly"
        return Fault(
            f"{SHARED_MEMORY} is mounted read-only", f"mount -o remount,rw {SHARED_MEMORY}. {container}"
        )
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK, effective_ids=True):
        said = f"mode {stat.S_IMODE(folder.st_mode):o}, of user {folder.st_uid}"
        return Fault(
            f"user {os.geteuid()} may not write to {SHARED_MEMORY} ({said})", f"chmod 1777 {SHARED_MEMORY}"
        )
    if space.f_files and not space.f_favail:
        text = f"{SHARED_MEMORY} has no file left of its {space.f_files} inodes"
        return Fault(text, f"mount -o remount,nr_inodes=1m {SHARED_MEMORY}, or remove files there")
    return None


def address_space() -> str:
    """ "" where it is not limited."""
    most = limit_of(resource.RLIMIT_AS)
    if most == UNLIMITED:
        return ""
    return f"ulimit -v allows {most >> 10} KiB of address space, {_address_space_kib()} are taken"


def file_size() -> str:
    """Shared memory is a file, too."""
    most = limit_of(resource.RLIMIT_FSIZE)
    said = "allows any size" if most == UNLIMITED else f"allows {most >> 10} KiB"
    return f"ulimit -f {said} for a file, and shared memory is one. Raise it: ulimit -f unlimited"


def _wanted(num_bytes: int) -> str:
    return f", {num_bytes} are wanted" if num_bytes else ""


def limit_of(which: int) -> int:
    """The soft limit of `resource`; UNLIMITED."""
    soft, _ = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def cgroup_folders(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """Of each hierarchy: our cgroup and all above it. A container sees its own as the root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / controllers if controllers and not controllers.startswith("name=") else root
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            yield folder
            folder = folder.parent
        yield base


def number_in(*paths: Path) -> int:
    """Of the first file that holds one; UNLIMITED: none does."""
    for path in paths:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return UNLIMITED


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _threads_of(user: int) -> int:
    count = 0
    for tasks in _PROC.glob("[0-9]*/task"):
        try:
            count += len(os.listdir(tasks)) if tasks.stat().st_uid == user else 0
        except OSError:  # it has ended
            continue
    return count


def _address_space_kib() -> int:
    try:
        pages = int((_PROC / "self/statm").read_text().split()[0])
    except OSError:
        return UNLIMITED
    return pages * resource.getpagesize() >> 10
