"""Every flag and counter of the kernels is declared once, and the memory model's table is made of these."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.signals import BEGIN, PAGE, ROOT, page_with, table

BACKEND = ROOT / "csrc/backend/gpu"
_DECLARED = re.compile(r"^struct (\w+) \{\n  static constexpr Signal kIs", re.MULTILINE)
_IN_MEMORY = re.compile(r"Device(?:Flag|Counter)<(\w+)>")


def declared(text: str) -> set[str]:
    """Signals that a header declares."""
    return set(_DECLARED.findall(text))


def listed(text: str) -> list[str]:
    """Signals in the header's list, in its order."""
    return re.sub(r"\s", "", text).split("usingAllSignals=std::tuple<")[1].split(">;")[0].split(",")


def in_memory(*texts: str) -> set[str]:
    """Signals that lie in a structure which kernels read and write."""
    return {name for text in texts for name in _IN_MEMORY.findall(text)}


def test_every_signal_is_listed_and_lies_in_memory() -> None:
    header = (BACKEND / "signals.h").read_text()
    all_declared = declared(header) | declared((BACKEND / "low_latency_signals.h").read_text())
    assert sorted(listed(header)) == sorted(all_declared)
    memory = ("layout.h", "net.h", "low_latency_net.h")
    assert all_declared == in_memory(*((BACKEND / name).read_text() for name in memory))


def test_a_signal_that_is_not_listed_is_found() -> None:
    """Control of the test above."""
    header = (BACKEND / "signals.h").read_text()
    added = "struct Write {\n  static constexpr Signal kIs{};\n};\n"
    more = header.replace("struct Read {", added + "struct Read {")
    assert declared(more) - set(listed(more)) == {"Write"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_table_of_the_memory_model_is_made_of_the_declarations() -> None:
    page = (ROOT / PAGE).read_text()
    rows = table()
    assert len(rows.splitlines()) == 2 + len(listed((BACKEND / "signals.h").read_text()))
    assert page == page_with(page, rows), "run python -m tests.signals --write"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_declaration_that_changes_changes_the_table(tmp_path: Path) -> None:
    """Control of the test above."""
    for folder in ("csrc/backend/gpu", "csrc/common", "tests/native"):
        ignored = shutil.ignore_patterns("gpu_on_cpu", "*.py")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    header = tmp_path / "csrc/backend/gpu/signals.h"
    header.write_text(header.read_text().replace("d: last block of `fold`", "d: first block of `fold`"))
    page = (ROOT / PAGE).read_text()
    assert page != page_with(page, table(tmp_path))


def test_a_page_without_a_place_for_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        page_with((ROOT / PAGE).read_text().replace(BEGIN, ""), "")
