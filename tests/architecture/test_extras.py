"""The extras of pyproject.toml name what each folder imports. It finds planted violations."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.test_layers import imports_of
from tests.architecture.tree import ROOT, plant, project_files

PROJECT = "uccl_ep_train"
OWN = {PROJECT, "recipes", "bench", "tests", "scripts"}
# Folder -> the extras that it is installed with.
EXTRAS = {
    "uccl_ep_train": ("megatron",),
    "recipes": ("recipes",),
    "bench": ("bench",),
    "tests": ("test", "dev"),
}
DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml", "_posixshmem": ""}
# Not required: whoever imports these goes on without.
OPTIONAL = {"deep_ep", "jax", "transformer_engine", "transformer_engine_torch", "ray", "triton"}
OPTIONAL_IN = {PROJECT: {"matplotlib"}}  # the planner's pictures

_NAME = re.compile(r"^[\w.-]+")


def required(root: Path, *extras: str) -> set[str]:
    """Distributions that the project brings with these extras, in lower case."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    waiting = [*project["dependencies"], *(need for extra in extras for need in project[_OPTIONAL][extra])]
    while waiting:
        need = waiting.pop()
        name = _NAME.match(need)
        assert name is not None, need
        if name.group() != PROJECT:
            found.add(name.group().lower())
            continue
        for extra in re.findall(r"\w+", need[name.end() :]):
            waiting += project[_OPTIONAL][extra]
    return found


_OPTIONAL = "optional-dependencies"


def check_extras(root: Path) -> list[str]:
    """What a folder imports is in the standard library, here, or required with its extras."""
    found = []
    for folder, extras in EXTRAS.items():
        there = required(root, *extras)
        for path in project_files(root, ".py", under=folder):
            for line, module in imports_of(path, root):
                top = module.split(".")[0]
                if top in OWN | OPTIONAL | OPTIONAL_IN.get(folder, set()) | sys.stdlib_module_names:
                    continue
                name = DISTRIBUTIONS.get(top, top)
                if name and name not in there:
                    where = f"{path.relative_to(root)}:{line}"
                    found.append(f"{where}: imports {module}: {name} is in none of {', '.join(extras)}")
    return found


def test_extras_name_what_is_imported() -> None:
    assert check_extras(ROOT) == []


_PYPROJECT = """
[project]
dependencies = ["torch>=2.4"]
[project.optional-dependencies]
megatron = ["megatron-core>=0.16.1"]
recipes = ["uccl_ep_train[megatron]", "tqdm"]
bench = ["matplotlib"]
test = ["uccl_ep_train[recipes, bench]"]
dev = []
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipes/bad.py", "import matplotlib.pyplot\n"),
        ("recipes/bad.py", "def f():\n    from packaging.version import Version\n"),
        ("bench/bad.py", "import megatron.core\n"),
        ("uccl_ep_train/bad.py", "import tqdm\n"),
        ("tests/bad.py", "import yaml\n"),
    ],
)
def test_a_planted_violation_is_found(name: str, text: str, tmp_path: Path) -> None:
    found = check_extras(plant(tmp_path, {"pyproject.toml": _PYPROJECT, name: text}))
    assert found and all(line.startswith(name) for line in found)


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    allowed = {
        "pyproject.toml": _PYPROJECT,
        "recipes/good.py": "import os\nimport torch\nimport tqdm\nfrom megatron import core\n",
        "bench/good.py": "import matplotlib\nfrom bench import cases\n",
        "tests/good.py": "import matplotlib\nimport tqdm\nimport megatron.core\n",
    }
    assert check_extras(plant(tmp_path, allowed)) == []


def check_named_packages(root: Path) -> list[str]:
    """Projects in packaging, which need this one, are of its version and for its Pythons."""
    own, *others = (
        tomllib.loads(path.read_text())["project"]
        for path in (root / "pyproject.toml", *sorted(root.glob("packaging/*/pyproject.toml")))
    )
    return [
        f"{other['name']}: {field} is {other[field]}, allowed is {own[field]}"
        for other in others
        for field in ("version", "requires-python")
        if other[field] != own[field]
    ]


def test_packages_of_other_names_are_for_the_same_python(tmp_path: Path) -> None:
    assert check_named_packages(ROOT) == []
    text = '[project]\nname = "x"\nversion = "0.1.0"\nrequires-python = ">={}"\n'
    plant(
        tmp_path, {"pyproject.toml": text.format("3.11"), "packaging/x/pyproject.toml": text.format("3.10")}
    )
    assert check_named_packages(tmp_path) == ["x: requires-python is >=3.10, allowed is >=3.11"]
