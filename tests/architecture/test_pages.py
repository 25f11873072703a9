"""The pages are short, agree with the tree, cite each result file. Each check finds a planted violation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import evidence
from tests.architecture.tree import ROOT, Check, plant, project_files

MAX_WORDS = 22_000
MAX_LINES_A_VERSION = 40
MAX_LINES = {"README.md": 120, "docs/performance.md": 150, "docs/architecture.md": 200}
COUNTED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "docs/*.md")
WRITE = "python -m tests.evidence --write"

_CITED = re.compile(r"(?<!\w)results/([\w-]+\.(?:json|png))")


def pages(root: Path) -> list[Path]:
    """Pages that people write: all but the one that cites every result file because it is generated."""
    return [path for path in project_files(root, ".md") if path != root / evidence.PAGE]


def check_evidence_is_current(root: Path) -> list[str]:
    """docs/evidence.md is what the tests and the result files give."""
    committed = (root / evidence.PAGE).read_text()
    return [] if committed == evidence.page(root) else [f"{evidence.PAGE} is stale: {WRITE}"]


def check_result_files(root: Path) -> list[str]:
    """Each result file is cited by a page, and each that is cited exists."""
    there = {path.name for path in project_files(root, under=evidence.RESULTS)}
    citing = {
        name: str(path.relative_to(root)) for path in pages(root) for name in _CITED.findall(path.read_text())
    }
    missing = [
        f"{page} cites {name}, which is not there" for name, page in citing.items() if name not in there
    ]
    return missing + [f"{evidence.RESULTS}/{name}: no page cites it" for name in sorted(there - set(citing))]


def check_length(root: Path) -> list[str]:
    """Who is new to the project can read its pages in a day."""
    texts = {str(path.relative_to(root)): path.read_text() for glob in COUNTED for path in root.glob(glob)}
    found = [
        f"{name}: more than {limit} lines"
        for name, limit in MAX_LINES.items()
        if texts.get(name, "").count("\n") > limit
    ]
    versions = re.split(r"^## ", texts.get("CHANGELOG.md", ""), flags=re.MULTILINE)[1:]
    found += [
        f"CHANGELOG.md: more than {MAX_LINES_A_VERSION} lines for {version.splitlines()[0]}"
        for version in versions
        if version.count("\n") > MAX_LINES_A_VERSION
    ]
    words = sum(len(text.split()) for text in texts.values())
    return found + ([f"docs: {words} words, allowed are {MAX_WORDS}"] if words > MAX_WORDS else [])


CHECKS: list[Check] = [check_evidence_is_current, check_result_files, check_length]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_pages_keep_the_rule(check: Check) -> None:
    assert check(ROOT) == []


RESULT = f"{evidence.RESULTS}/a.json"


def small_tree(root: Path) -> Path:
    """A tree whose pages keep the rules: a folder of tests, a result file, pages."""
    record = {
        "commit": "0123456789ab-dirty",
        "hardware": "Intel(R) Xeon(R) Processor, 32 cores, 2 x G, torch 2",
    }
    plant(
        root,
        {
            "tests/unit/test_a.py": '"""Shows A."""\ndef test_a(): ...\n',
            "tests/unit/b_claims.cc": 'CLAIM("b holds") {}\nSLOW_CLAIM("c holds") {}\n',
            evidence.FOLDERS: '[unit]\nshows = "A holds."\nran = ["CI"]\n',
            RESULT: json.dumps([record]),
            "README.md": f"see [a]({RESULT})\n",
        },
    )
    return plant(root, {evidence.PAGE: evidence.page(root)})


def test_a_small_tree_keeps_the_rules_and_its_page_says_what_is_there(tmp_path: Path) -> None:
    root = small_tree(tmp_path)
    assert [line for check in CHECKS for line in check(root)] == []
    text = (root / evidence.PAGE).read_text()
    assert "* **`tests/unit`** (1 tests, 2 native claims): A holds.\n  * CI\n" in text
    assert text.endswith(f"\n\n**2 x G**\n\n* [a](../{RESULT}): 0123456-dirty; 1\n")
    assert evidence.module_lines(root) == ["tests/unit/test_a.py (1): Shows A."]


LONG_LINE = "word " * (MAX_WORDS + 1)
PLANTED: list[tuple[Check, str, str, str]] = [
    (check_evidence_is_current, "tests/unit/test_b.py", "def test_b(): ...\n", "stale"),
    (check_evidence_is_current, "tests/unit/c_claims.cc", 'CLAIM("d holds") {}\n', "stale"),
    (check_evidence_is_current, evidence.FOLDERS, '[unit]\nshows = "B."\nran = []\n', "stale"),
    (check_evidence_is_current, RESULT, '[{"commit": "fedcba9", "hardware": "CPU"}]', "stale"),
    (check_evidence_is_current, evidence.PAGE, "# Written by hand\n", "stale"),
    (check_result_files, f"{evidence.RESULTS}/b.json", "[]", "b.json: no page cites it"),
    (check_result_files, f"{evidence.RESULTS}/a.png", "", "a.png: no page cites it"),
    (check_result_files, "docs/bad.md", "`bench/results/gone.json`\n", "cites gone.json"),
    (check_result_files, evidence.PAGE, "../bench/results/gone.json\n", ""),
    (check_length, "README.md", "line\n" * (MAX_LINES["README.md"] + 1), "more than 120 lines"),
    (check_length, "CHANGELOG.md", "## 2\n" + "* a\n" * MAX_LINES_A_VERSION, "more than 40 lines for 2"),
    (check_length, "CHANGELOG.md", "## 2\n* a\n## 1\n" + "* a\n" * (MAX_LINES_A_VERSION - 1), ""),
    (check_length, "docs/bad.md", LONG_LINE, "words, allowed are"),
    (check_length, "other/bad.md", LONG_LINE, ""),
]


@pytest.mark.parametrize(
    ("check", "name", "text", "said"), PLANTED, ids=lambda value: getattr(value, "__name__", None) or ""
)
def test_a_planted_violation_is_found(check: Check, name: str, text: str, said: str, tmp_path: Path) -> None:
    """An empty `said`: it is allowed."""
    found = check(plant(small_tree(tmp_path), {name: text}))
    assert len(found) == bool(said) and all(said in line for line in found)


def test_a_folder_without_a_note_is_an_error(tmp_path: Path) -> None:
    root = plant(small_tree(tmp_path), {"tests/new/test_n.py": "def test_n(): ...\n"})
    with pytest.raises(KeyError, match="new"):
        evidence.page(root)
