"""Which GPU architectures a build compiles kernels for."""

from __future__ import annotations

import runpy
import stat
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def architectures() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "csrc" / "gpu" / "cuda" / "build.py"), run_name="build")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(text, status): its nvidia-smi prints this; machine(None): it has none."""

    def make(printed: str | None, status: int = 0) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        if printed is None:
            return
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nprintf '{printed}'\nexit {status}\n")
        smi.chmod(smi.stat().st_mode | stat.S_IXUSR)

    return make


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("9.0\\n9.0\\n", ["90a"]),
        ("8.9\\n", ["80"]),
        ("10.0\\n", ["100a"]),
        ("12.1\\n", ["90"]),
        ("13.0\\n", ["90"]),
        ("9.0\\n8.0\\n", ["80", "90a"]),
        ("7.5\\n", []),
        (None, []),
    ],
    ids=["Hopper", "Ada", "Blackwell", "not listed", "to come", "mixed", "too old", "no GPU"],
)
@pytest.mark.parametrize("asked", ["", "auto"])
def test_kernels_are_for_the_gpus_of_this_machine(
    architectures: dict[str, Any], machine: Any, asked: str, printed: str | None, expected: list[str]
) -> None:
    machine(printed)
    assert architectures["chosen"](asked) == expected


def test_a_driver_that_does_not_answer_is_no_gpu(architectures: dict[str, Any], machine: Any) -> None:
    machine("9.0\\n", status=9)
    assert architectures["chosen"]("auto") == []


def test_what_is_asked_for_is_built_whatever_is_here(architectures: dict[str, Any], machine: Any) -> None:
    machine("9.0\\n")
    assert architectures["chosen"]("none") == []
    assert architectures["chosen"]("all") == list(architectures["KNOWN"])
    assert architectures["chosen"]("90a,80") == ["80", "90a"]


@pytest.mark.parametrize("asked", ["70", "90a auto", "sm_90a"])
def test_an_unknown_architecture_is_refused(architectures: dict[str, Any], asked: str) -> None:
    with pytest.raises(SystemExit, match=rf"UCCL_EP_CUDA_ARCHS = '{asked}': allowed is auto .* 80, 90a, .*"):
        architectures["chosen"](asked)


def test_an_older_compiler_makes_ptx_in_place_of_what_it_does_not_know(architectures: dict[str, Any]) -> None:
    listed = "compute_80\ncompute_90\ncompute_100\n"
    assert architectures["known_to"](listed, ["80", "100a"]) == (["80", "100a"], [])
    assert architectures["known_to"](listed, ["80", "103a", "120a"]) == (["80", "90"], ["103a", "120a"])


def test_objects_of_different_architectures_lie_apart(architectures: dict[str, Any]) -> None:
    known = list(architectures["KNOWN"])
    folders = [architectures["folder_suffix"](names) for names in ([], ["80"], ["90a"], known)]
    assert len(set(folders)) == len(folders)
