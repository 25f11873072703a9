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
_FLAG = re.compile(r"DeviceFlag<(\w+)>")
_STRUCTURE = re.compile(r"^struct (?:alignas\(\w+\) )?(\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_DECLARATION = re.compile(
    r"^struct (\w+) \{\n  static constexpr Signal kIs\{(.*?)\};\n\};", re.MULTILINE | re.DOTALL
)
HEADERS = ("signals.h", "low_latency_signals.h")
MEMORY = ("layout.h", "net.h", "low_latency_net.h")
# Structures of flags that other GPUs write, or that the host reads.
BEYOND_THE_GPU = ("DeviceMap", "LowLatencyMap", "SlotVote", "HostCounts", "HostError")


def declared(text: str) -> set[str]:
    """Signals that a header declares."""
    return set(_DECLARED.findall(text))


def listed(text: str) -> list[str]:
    """Signals in the header's list, in its order."""
    return re.sub(r"\s", "", text).split("usingAllSignals=std::tuple<")[1].split(">;")[0].split(",")


def in_memory(text: str) -> set[str]:
    """Signals that lie in a structure which kernels read and write."""
    return set(_IN_MEMORY.findall(text))


def test_every_signal_is_listed_and_lies_in_memory() -> None:
    header = (BACKEND / "signals.h").read_text()
    all_declared = declared(text_of(HEADERS))
    assert sorted(listed(header)) == sorted(all_declared)
    assert all_declared == in_memory(text_of(MEMORY))


def wrong_scopes(headers: str, memory: str) -> list[str]:
    """Flags whose scope does not reach who reads them; counters are one GPU's."""
    declarations = dict(_DECLARATION.findall(headers))
    beyond = {
        flag
        for name, body in _STRUCTURE.findall(memory)
        if name in BEYOND_THE_GPU
        for flag in _FLAG.findall(body)
    }
    found = []
    for name, text in declarations.items():
        is_system = ".scope = Scope::kGpu" not in text
        if is_system != (name in beyond or "its host" in text):
            found.append(name)
    return found


def text_of(names: tuple[str, ...]) -> str:
    return "".join((BACKEND / name).read_text() for name in names)


def test_the_scope_of_a_signal_reaches_its_readers() -> None:
    headers = text_of(HEADERS)
    assert {name for name, _ in _DECLARATION.findall(headers)} == declared(headers)
    assert wrong_scopes(headers, text_of(MEMORY)) == []


def test_a_scope_that_is_too_narrow_or_too_wide_is_found() -> None:
    """Control of the test above. On a CPU all scopes are alike, so no claim finds these."""
    headers, memory = text_of(HEADERS), text_of(MEMORY)
    narrow = headers.replace('.name = "merged[s]",', '.name = "merged[s]", .scope = Scope::kGpu,')
    assert wrong_scopes(narrow, memory) == ["Merged"]
    planned = headers.index("struct Planned {")
    wide = headers[:planned] + headers[planned:].replace(".scope = Scope::kGpu,", "", 1)
    assert wrong_scopes(wide, memory) == ["Planned"]


def without_memory(layout: str, laid_out: str) -> list[str]:
    """Parts of a region that never get a place: they would lie at its beginning, where others are."""
    structures = dict(_STRUCTURE.findall(layout))
    found = []
    for name, of in (("DeviceMap", "l"), ("LowLatencyMap", "map")):
        taken = re.findall(rf"cursor\.take\({of}\.(\w+)", laid_out)
        found += [
            part for part in re.findall(r"^  Part<.+> (\w+);", structures[name], re.M) if part not in taken
        ]
    return found


def test_every_part_of_a_region_has_a_place() -> None:
    layout, laid_out = ((BACKEND / name).read_text() for name in ("layout.h", "layout_parts.cc"))
    assert without_memory(layout, laid_out) == []
    # Controls: a flag that is only declared, and one whose place is lost.
    more = layout.replace(
        "struct DeviceMap {\n", "struct DeviceMap {\n  Part<DeviceFlag<Read>> written;  // [members]\n"
    )
    assert without_memory(more, laid_out) == ["written"]
    assert without_memory(layout, laid_out.replace("cursor.take(l.merged", "cursor.skip(l.merged")) == [
        "merged"
    ]


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
