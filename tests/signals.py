"""The table of signals in docs/memory_model.md: python -m tests.signals [--write].

It is made of csrc/backend/gpu/signals.h. This prints the page, or writes it.
`tests/architecture/test_signals.py` fails when the committed page is not this one.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/memory_model.md"
BEGIN, END = "<!-- signals: made by python -m tests.signals --write -->\n", "<!-- end of signals -->\n"


def table(root: Path = ROOT) -> str:
    """The declarations as a Markdown table. Raises `CalledProcessError` where they do not compile."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "signal_table")
        source = root / "tests/native/signal_table.cc"
        subprocess.run(["g++", "-std=c++20", "-I", root / "csrc", source, "-o", program], check=True)
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def page_with(text: str, rows: str) -> str:
    """The page `text` with the table `rows`. Raises `ValueError` where the page has no place for it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN.strip()!r} and {END.strip()!r} around the table")
    return before + begin + rows + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    options = parser.parse_args()
    page = page_with((ROOT / PAGE).read_text(), table())
    if options.write:
        (ROOT / PAGE).write_text(page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
