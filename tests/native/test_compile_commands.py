"""Claims about compile_commands.json, which a build writes for editors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNIT = "csrc/proxy/health.cc"


def entries() -> dict[str, list[str]]:
    """The command of each unit."""
    listed = json.loads((ROOT / "compile_commands.json").read_text())
    assert all(entry["directory"] == str(ROOT) for entry in listed)
    return {entry["file"]: entry["arguments"] for entry in listed}


def compiles(command: list[str]) -> bool:
    done = subprocess.run([*command, "-fsyntax-only"], cwd=ROOT, capture_output=True, check=False)
    return done.returncode == 0


def test_each_unit_of_the_build_has_a_command() -> None:
    units = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.c[cu]")}
    commands = set(entries())
    assert commands <= units
    # A build without nvcc leaves out what is for GPUs.
    assert all("gpu" in unit for unit in units - commands)


def test_a_command_compiles_its_unit_without_the_build() -> None:
    """As an editor runs it: there may be no build folder any more."""
    command = [word for word in entries()[UNIT] if word != "-MMD"]
    assert not any(word.startswith("build/") for word in command[: command.index("-o")])
    assert compiles(command)
    assert not compiles([word for word in command if word != "-Icsrc"]), "the test proves nothing"


def test_a_kernel_has_clangs_command() -> None:
    for unit, command in entries().items():
        assert (command[0] == "clang++" and "-xcuda" in command) == unit.endswith(".cu")
