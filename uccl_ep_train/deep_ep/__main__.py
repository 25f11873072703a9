"""python -m uccl_ep_train.deep_ep SCRIPT ... runs a program whose deep_ep is this library's.

So do the processes that the program starts: they find it by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from uccl_ep_train.deep_ep import install
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings import env

IMPORTABLE = Path(__file__).resolve().parent / "importable"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m uccl_ep_train.deep_ep", description=__doc__)
    parser.add_argument("--replace", action="store_true", help="hide a deep_ep that is installed")
    parser.add_argument("script", help="a program in Python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    given = parser.parse_args()
    script = Path(given.script)
    if not script.is_file() and not (script / "__main__.py").is_file():
        parser.error(f"SCRIPT {given.script}: allowed is a file with a program in Python")
    try:
        install(replace=given.replace)
    except ConfigError:
        parser.error("deep_ep is installed; allowed with --replace, which hides it")
    later = env.read("PYTHONPATH")
    env.set_value("PYTHONPATH", f"{IMPORTABLE}{os.pathsep}{later}" if later else str(IMPORTABLE))
    sys.argv = [given.script, *given.arguments]
    # As Python does for a script. Processes that are spawned get this path, others PYTHONPATH.
    sys.path[:1] = [str(Path(given.script).resolve().parent), str(IMPORTABLE)]
    runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main()
