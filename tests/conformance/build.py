"""Compiles the conformance suite and prints where the program is.

    python tests/conformance/build.py [--sanitizer memory|thread]

It needs nothing of the machine that compiled it but the C++ library, so it can be run in a virtual machine
that shares this file system: `$(python tests/conformance/build.py) verbs`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.native import building

HERE = Path(__file__).resolve().parent
FLAVOURS = {"plain": building.PLAIN, "memory": building.MEMORY, "thread": building.THREAD}


def build(flavour: building.Flavour) -> Path:
    """The program, made anew where something it depends on has changed."""
    binary = building.ROOT / "build" / "conformance" / f"conformance-{flavour.name}"
    binary.parent.mkdir(parents=True, exist_ok=True)
    return building.link(binary, [*sorted(HERE.glob("*.cc")), *building.product_sources()], flavour)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sanitizer", choices=sorted(FLAVOURS), default="plain", help="default: none")
    try:
        print(build(FLAVOURS[parser.parse_args(argv).sanitizer]))
    except building.CannotBuild as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
