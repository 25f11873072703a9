"""docs/evidence.md, made of the tests and of bench/results: python -m tests.evidence [--write | --modules]

It prints the page, writes it, or prints what each test module shows. tests/folders.toml says what a folder
shows and where it has run. `tests/architecture/test_pages.py` fails when the committed page is not this one.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/evidence.md"
FOLDERS = "tests/folders.toml"
RESULTS = "bench/results"

HEAD = """# What is proven, and on what

Made by `python -m tests.evidence --write` from the tests, `tests/folders.toml` and `bench/results`.
[Status](status.md) says what is missing, and [performance](performance.md) what the figures mean.

## Tests

A test is a claim. It compares bits with the oracle, `uccl_ep_train/oracle`, and a control shows that it can
fail. *CI* is a machine with a CPU alone. Native claims are sentences in C++ programs.
`python -m tests.evidence --modules` has a line for each module.
"""

_CLAIM = re.compile(r'^(?:SLOW_)?CLAIM\("', re.MULTILINE)
_COMMIT = re.compile(r"^([0-9a-f]{7})[0-9a-f]*")
_HOST = re.compile(r"^Intel\(R\)[^,]*, \d+ cores, |, torch .*$")


def num_tests(path: Path) -> int:
    """Test functions of a module; a parametrised one counts once."""
    tree = ast.walk(ast.parse(path.read_text()))
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree)


def folder_lines(folder: Path, note: dict[str, Any]) -> list[str]:
    """The section of one folder of tests: what it shows, how many tests it has, where they have run."""
    tests = sum(num_tests(path) for path in folder.glob("test_*.py"))
    claims = sum(len(_CLAIM.findall(path.read_text())) for path in folder.glob("*.cc"))
    counts = f"{tests} tests" + (f", {claims} native claims" if claims else "")
    return [
        f"* **`tests/{folder.name}`** ({counts}): {note['shows']}",
        *(f"  * {place}" for place in note["ran"]),
    ]


def module_lines(root: Path = ROOT) -> list[str]:
    """A line for each test module: how many tests it has, and its docstring's."""
    modules = sorted((root / "tests").glob("*/test_*.py"))
    said = [(ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0] for path in modules]
    return [
        f"{path.relative_to(root)} ({num_tests(path)}): {text}"
        for path, text in zip(modules, said, strict=True)
    ]


def result_lines(paths: list[Path]) -> list[str]:
    """The result files by hardware: of each its commits, how many records, how many of them could not run."""
    lines: dict[str, list[str]] = {}
    for path in paths:
        records: list[dict[str, Any]] = json.loads(path.read_text())
        # Seven digits, and what marks a tree with changes.
        commits = sorted({_COMMIT.sub(r"\1", record["commit"]) for record in records})
        not_run = sum(bool(record.get("not_run")) for record in records)
        counts = f"{len(records)}" + (f", {not_run} of them not run" if not_run else "")
        hardware = ", ".join(sorted({_HOST.sub("", record["hardware"]) for record in records}))
        link = f"[{path.stem}](../{RESULTS}/{path.name})"
        lines.setdefault(hardware, []).append(f"* {link}: {', '.join(commits)}; {counts}")
    return [line for hardware in sorted(lines) for line in ("", f"**{hardware}**", "", *lines[hardware])]


def page(root: Path = ROOT) -> str:
    """The text of docs/evidence.md for the tree at `root`. Raises KeyError for a folder without a note."""
    notes = tomllib.loads((root / FOLDERS).read_text())
    lines = [HEAD]
    for folder in sorted({path.parent for path in (root / "tests").glob("*/test_*.py")}):
        lines += folder_lines(folder, notes[folder.name])
    lines += ["", "## Result files", "", "Of each: the commits, and how many records."]
    lines += result_lines(sorted((root / RESULTS).glob("*.json")))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes docs/evidence.md.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="write the page instead of printing it")
    group.add_argument("--modules", action="store_true", help="print what each test module shows")
    args = parser.parse_args()
    if args.write:
        (ROOT / PAGE).write_text(page())
    else:
        print("\n".join(module_lines()) if args.modules else page().rstrip())
