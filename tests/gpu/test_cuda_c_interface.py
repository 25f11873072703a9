"""The C interface on two GPUs: values of new and known plans, codes, metadata, a capacity, sums."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import needs_gpus
from uccl_ep_train.tools import c_interface

PROGRAM = Path(__file__).with_name("c_interface_rank.py")
pytestmark = [
    pytest.mark.gpu,
    needs_gpus(2),
]


def run(program: Path, domains: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), str(c_interface.LIBRARY), str(domains)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize("domains", [1, 2])
def test_two_ranks_get_every_value_right(domains: int) -> None:
    done = run(PROGRAM, domains)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 ranks on GPUs, all values are right\n"


def test_a_wrong_value_is_found(tmp_path: Path) -> None:
    """Negative control: a program that expects other sums."""
    text, right = PROGRAM.read_text(), "given.x * K)\n    got"
    assert text.count(right) == 1
    wrong = text.replace(right, "given.x * K + 1)\n    got")
    changed = tmp_path / "c_interface_rank.py"
    changed.write_text(
        wrong.replace("Path(__file__).resolve().parents[2]", f"Path({str(PROGRAM)!r}).parents[2]")
    )
    done = run(changed, 1)
    assert done.returncode != 0 and "AssertionError" in done.stderr
