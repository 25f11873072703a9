"""A source distribution has all that its build reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
FOLDERS = ("csrc", "packaging", "uccl_ep_train")
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "include", "lib", "build", "*.egg-info")

pytest.importorskip("setuptools")
pytest.importorskip("pybind11")


def setup(folder: Path, *words: str) -> None:
    command = [sys.executable, "setup.py", "-q", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def sources(folder: Path) -> Path:
    """A copy of what a clone has and the build reads."""
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=BUILT)
    return folder


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def unpacked(clone: Path, into: Path) -> Path:
    """The source distribution of a clone."""
    setup(clone, "sdist", "--formats=gztar", "-d", str(into))
    (archive,) = into.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    return into / archive.name.removesuffix(".tar.gz")


def test_a_source_distribution_has_every_file_of_the_build(tmp_path: Path) -> None:
    clone = sources(tmp_path / "clone")
    needed = names_in(clone)
    assert {"csrc/units.py", "csrc/gpu/cuda/build.py", "csrc/c_api/uccl_ep.h"} < needed
    made = unpacked(clone, tmp_path / "made")
    assert needed - names_in(made) == set()
    setup(made, "egg_info")  # setup.py finds what it reads before it compiles


def test_without_the_manifest_files_are_missing(tmp_path: Path) -> None:
    """Control."""
    clone = sources(tmp_path / "clone")
    needed = names_in(clone) - {"MANIFEST.in"}
    (clone / "MANIFEST.in").unlink()
    missing = needed - names_in(unpacked(clone, tmp_path / "made"))
    assert {"csrc/units.py", "csrc/gpu/cuda/build.py"} <= missing
