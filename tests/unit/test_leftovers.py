"""What dead processes left in /dev/shm is removed; what a living process has is not, wherever that runs."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.by_hand import close, create
from uccl_ep_train.core.native import load_native
from uccl_ep_train.group import leftovers

NOBODY = 65534
NO_PROCESS = 2**22 + 1
"""No kernel gives this pid."""


def name(pid: int = NO_PROCESS, number: int = 0) -> str:
    return f"uccl_ep.{pid}.{number:032x}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """By an open file of its own, as another process has it."""
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_what_nobody_has_locked_is_removed(tmp_path: Path) -> None:
    left = [tmp_path / name(), tmp_path / f"uccl_ep_probe_{NO_PROCESS}.{1:024x}"]
    for path in left:
        path.touch()
    assert leftovers.find(tmp_path) == sorted(map(str, left))
    leftovers.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_segment_that_is_locked_stays_whatever_its_pid_says(tmp_path: Path) -> None:
    """A container with pids of its own shares the folder: its pid is nobody's here, or somebody else's."""
    segments = [tmp_path / name(NO_PROCESS), tmp_path / name(os.getpid(), 1), tmp_path / name(1, 2)]
    for path in segments:
        path.touch()
    with locked(segments[0]), locked(segments[1]), locked(segments[2]):
        leftovers.sweep(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted(segments)
    # Control: it was the locks. A pid that lives, because another process has got it, keeps nothing.
    leftovers.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stranger", ["uccl_ep.0123456789abcdef0123456789abcdef", "psm_1", "uccl_ep.1.x"])
def test_what_is_not_named_as_ours_is_left_alone(tmp_path: Path, stranger: str) -> None:
    (tmp_path / stranger).touch()
    leftovers.sweep(tmp_path)
    assert (tmp_path / stranger).exists()


def test_links_and_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / name(number=1)).symlink_to(tmp_path / "target")
    (tmp_path / name(number=2)).mkdir()
    leftovers.sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_what_another_user_left_is_left_to_that_user(tmp_path: Path) -> None:
    path = tmp_path / name()
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    leftovers.sweep(tmp_path)
    assert path.exists()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    leftovers.sweep(tmp_path / "none")
    assert leftovers.find(tmp_path / "none") == []


def test_a_probe_of_a_living_process_is_locked() -> None:
    probe = load_native().DomainProbe("kernel")
    found = re.search(rb"/(uccl_ep[.][0-9.a-f]+)", probe.offer())
    assert found is not None
    path = leftovers.SHARED_MEMORY / found[1].decode()
    leftovers.sweep()
    assert path.exists()
    del probe
    assert not path.exists()


def test_a_creation_sweeps() -> None:
    path = leftovers.SHARED_MEMORY / name(number=os.getpid())
    path.touch()
    close(create(2))
    assert not path.exists()
