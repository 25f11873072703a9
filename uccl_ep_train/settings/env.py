"""The only module that reads the environment. `python -m uccl_ep_train.env` prints every variable of this
package.

`variables.py` has the table of variables and their meanings. This module imports only the standard library:
`setup.py` runs this file before the package exists.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

FAMILY_PREFIX = "UCCL_"


def of_family(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The `UCCL_*` variables that are set, known or not."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(environ) if name.startswith(FAMILY_PREFIX)}


def read(name: str, default: str = "") -> str:
    """A variable of other software (RANK, MASTER_ADDR, CUDA_HOME ...)."""
    return os.environ.get(name, default)


def set_default(name: str, value: str) -> None:
    """Sets a variable that another library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def set_value(name: str, value: str) -> None:
    """Sets a variable that another library reads, overriding any value; child processes inherit it."""
    os.environ[name] = value


def warnings_are_errors() -> bool:
    """UCCL_EP_WERROR=1, read by the build."""
    return os.environ.get("UCCL_EP_WERROR", "") == "1"


def cuda_architectures() -> str:
    """UCCL_EP_CUDA_ARCHS, read by the build: see `csrc/gpu/cuda/build.py`."""
    return os.environ.get("UCCL_EP_CUDA_ARCHS", "auto")


def sanitizer() -> str:
    """UCCL_EP_SANITIZE, read by the build; empty: none."""
    name = os.environ.get("UCCL_EP_SANITIZE", "")
    if name not in ("", "address", "undefined", "thread"):
        raise SystemExit(
            f"environment variable UCCL_EP_SANITIZE = {name!r}: allowed is address | undefined | thread"
        )
    return name


def _main() -> None:
    import argparse

    from uccl_ep_train.settings.variables import table

    parser = argparse.ArgumentParser(
        prog="python -m uccl_ep_train.env", description="Prints every variable, its value and its meaning."
    )
    parser.parse_args()
    print(table())


if __name__ == "__main__":
    import sys

    from uccl_ep_train.common.command_line import run

    sys.exit(run(_main))
