"""Command-line tools under `python -OO`, which removes docstrings and assertions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recipes import launch, quality
from uccl_ep_train.api import trace
from uccl_ep_train.deep_ep import __main__ as deep_ep
from uccl_ep_train.megatron import launch as megatron
from uccl_ep_train.planner import __main__ as planner
from uccl_ep_train.settings import env
from uccl_ep_train.tools import c_interface, calibrate
from uccl_ep_train.tools.doctor import __main__ as doctor

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_DOCSTRINGS = """
import contextlib, importlib, sys
assert __debug__ is False
for name in sys.argv[1:]:
    tool = importlib.import_module(name)
    main = getattr(tool, "main", None) or tool._main
    sys.argv = [name, "--help"]
    with contextlib.suppress(SystemExit):
        main(["--help"]) if main.__code__.co_argcount else main()
    print("\\nshown", name)
"""


def test_every_tool_helps_where_python_has_removed_its_text() -> None:
    """`python -OO`, or PYTHONOPTIMIZE=2 for a whole job."""
    modules = (launch, quality, deep_ep, megatron, planner, c_interface, calibrate, doctor, trace, env)
    names = [module.__name__ for module in modules]
    done = subprocess.run(
        [sys.executable, "-OO", "-c", WITHOUT_DOCSTRINGS, *names],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("shown ")] == names, (
        done.stderr
    )
    assert "None" not in done.stdout.splitlines()
