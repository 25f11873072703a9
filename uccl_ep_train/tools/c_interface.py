"""Where the C interface lies: `python -m uccl_ep_train.tools.c_interface [--cflags] [--libs]`

Without an option it prints the folder for PKG_CONFIG_PATH. With one it prints what pkg-config does: what a
compiler needs, quoted for a shell where a path has spaces.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from uccl_ep_train.common.command_line import run

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY = PACKAGE / "lib" / "libuccl_ep.so"


def cflags() -> list[str]:
    return [f"-I{PACKAGE / 'include'}"]


def libs() -> list[str]:
    return [f"-L{LIBRARY.parent}", f"-Wl,-rpath,{LIBRARY.parent}", "-luccl_ep"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="uccl_ep_train.tools.c_interface", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cflags", action="store_true", help="for a compiler")
    parser.add_argument("--libs", action="store_true", help="for a linker")
    asked = parser.parse_args()
    if not LIBRARY.is_file():
        raise SystemExit(f"{LIBRARY} is missing: install uccl_ep_train again, its build makes it")
    words = (cflags() if asked.cflags else []) + (libs() if asked.libs else [])
    print(shlex.join(words) or LIBRARY.parent / "pkgconfig")


if __name__ == "__main__":
    sys.exit(run(main))
