"""docs/architecture.md has the contracts that others cite, tests that hold them, and the layers.

Each check is also shown to find a planted violation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_layers import LAYERS, PACKAGE
from tests.architecture.tree import CPP, ROOT, Check, plant, project_files

PAGE = "docs/architecture.md"
MAX_LINES = 200

_HEADING = re.compile(r"^### Contract (\d+): \S.*$", re.MULTILINE)
# "contract 5", "contracts 2 and 3"; a comment may be wrapped in between.
_CITED = re.compile(r"\b[Cc]ontracts?\s+(?:(?://|#|\*)\s*)?(\d+(?:(?:,\s*|\s+and\s+|\s+to\s+)\d+)*)")
_TEST = re.compile(r"`(tests/[\w./-]+)`")
_CLAIMS = re.compile(r"^(?:async )?def test_|^CLAIM\(", re.MULTILINE)


def contracts_of(page: str) -> dict[int, str]:
    """Number and section of every contract on the page."""
    parts = _HEADING.split(page)
    return {int(number): section for number, section in zip(parts[1::2], parts[2::2], strict=True)}


def cited(text: str) -> Iterator[tuple[int, int]]:
    """(line, number) of every contract that a text cites."""
    for match in _CITED.finditer(text):
        for number in re.findall(r"\d+", match.group(1)):
            yield text.count("\n", 0, match.start()) + 1, int(number)


def check_cited_contracts(root: Path) -> list[str]:
    """A contract that code, tests or docs cite is on the page."""
    known = contracts_of((root / PAGE).read_text())
    return [
        f"{path.relative_to(root)}:{line}: contract {number} is not in {PAGE}"
        for path in project_files(root, ".py", ".md", ".pml", ".sh", *CPP)
        if path.name != Path(__file__).name
        for line, number in cited(path.read_text())
        if number not in known
    ]


def check_holders(root: Path) -> list[str]:
    """Each contract names tests, and these exist and claim something."""
    page = (root / PAGE).read_text()
    found = []
    for number, section in contracts_of(page).items():
        if not _TEST.search(section):
            found.append(f"{PAGE}: no test holds contract {number}")
    for name in _TEST.findall(page):
        path = root / name
        if not path.is_file():
            found.append(f"{PAGE}: {name} does not exist")
        elif not _CLAIMS.search(path.read_text()):
            found.append(f"{PAGE}: {name} claims nothing")
    return found


def check_numbers(root: Path) -> list[str]:
    """Contracts are numbered from 1 on, without a gap or a number twice, on a page of bounded length."""
    page = (root / PAGE).read_text()
    numbers = [int(number) for number in _HEADING.findall(page)]
    found = [f"{PAGE}: contracts {numbers}"] if numbers != list(range(1, len(numbers) + 1)) else []
    lines = len(page.splitlines())
    return found + ([f"{PAGE}: {lines} lines, at most {MAX_LINES}"] if lines > MAX_LINES else [])


def check_layers(root: Path) -> list[str]:
    """The page's tables of layers are the lists that test_layers.py holds the code to."""
    cells = re.findall(r"^\| (`[^|]*) \|", (root / PAGE).read_text(), re.MULTILINE)
    named = re.findall(r"`(\w+)[^`]*`", " ".join(cells))
    return [] if named == _NAMED else [f"{PAGE}: layers {named}, but tests/architecture has {_NAMED}"]


_NAMED = [*LAYERS, *(folder for folders in PACKAGE for folder in folders)]

# ------------------------------------------------------------------------------------ claims

CHECKS: list[Check] = [check_cited_contracts, check_holders, check_numbers, check_layers]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_page_is_right(check: Check) -> None:
    assert check(ROOT) == []


def test_code_tests_and_docs_cite_contracts() -> None:
    places = {
        path.relative_to(ROOT).parts[0]
        for path in project_files(ROOT, ".py", ".md", *CPP)
        if path.name != Path(__file__).name and any(cited(path.read_text()))
    }
    assert places >= {"csrc", "tests", "docs"}


_LAYERS = "".join(f"| `{layer}` | x |\n" for layer in _NAMED)
_GOOD = f"{_LAYERS}### Contract 1: a\n`tests/a.py`\n### Contract 2: b\n`tests/b.cc`\n"
_TREE = {
    PAGE: _GOOD,
    "tests/a.py": "def test_a() -> None: ...\n",
    "tests/b.cc": 'CLAIM("b") {}\n',
    "csrc/good.h": "// Contracts 1 and 2; a contract\n// 2; a contract of 12 months\n",
}

PLANTED: list[tuple[Check, str, str]] = [
    (check_cited_contracts, "csrc/engine/bad.cc", "// so it is (contract 3)\n"),
    (check_cited_contracts, "docs/bad.md", "Contracts 1, 2 and 7 say so.\n"),
    (check_cited_contracts, "tests/bad.py", "# by contract\n# 9\n"),
    (check_holders, PAGE, _GOOD.replace("tests/b.cc", "tests/gone.cc")),
    (check_holders, PAGE, _GOOD.replace("`tests/b.cc`", "nobody")),
    (check_holders, "tests/a.py", "def helper() -> None: ...\n"),
    (check_numbers, PAGE, _GOOD.replace("Contract 2", "Contract 3")),
    (check_numbers, PAGE, _GOOD + "\n" * MAX_LINES),
    (check_layers, PAGE, _GOOD.replace("| `queue` | x |\n", "")),
    (check_layers, PAGE, _GOOD.replace("| `group` | x |\n", "") + "| `group` | x |\n"),
]


@pytest.mark.parametrize(
    ("check", "name", "text"), PLANTED, ids=lambda value: getattr(value, "__name__", None) or ""
)
def test_a_planted_violation_is_found(check: Check, name: str, text: str, tmp_path: Path) -> None:
    assert check(plant(tmp_path, _TREE | {name: text})) != []


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    plant(tmp_path, _TREE)
    assert [line for check in CHECKS for line in check(tmp_path)] == []
