"""Claims about import paths from before the package had folders: programs of others go on as they were."""

from __future__ import annotations

import importlib
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest

import uccl_ep_train
from recipes.earlier_paths import HOMES as HOMES_OF_RECIPES
from uccl_ep_train.earlier_paths import HOMES, EarlierPaths
from uccl_ep_train.settings.config import EpConfig

ROOT = Path(__file__).resolve().parents[2]
TABLES = {"uccl_ep_train": HOMES, "recipes": HOMES_OF_RECIPES}
NEED_MEGATRON = ("attention", "checkpoint", "data", "dispatchers", "model", "train")
BELOW = [f"doctor.{path.stem}" for path in (ROOT / "uccl_ep_train" / "tools" / "doctor").glob("[!_]*.py")]


def is_the_same(package: str, earlier: str) -> bool:
    name, dot, below = earlier.partition(".")
    module = importlib.import_module(f"{package}.{earlier}")
    today = importlib.import_module(f"{package}.{TABLES[package][name]}{dot}{below}")
    return module is today and module.__spec__ is not None and module.__spec__.name == today.__name__


@pytest.mark.parametrize("earlier", [*HOMES, *BELOW])
def test_an_earlier_path_gives_the_same_module(earlier: str) -> None:
    assert is_the_same("uccl_ep_train", earlier)


@pytest.mark.parametrize("earlier", [name for name in HOMES_OF_RECIPES if name not in NEED_MEGATRON])
def test_an_earlier_path_of_a_recipe_gives_the_same_module(earlier: str) -> None:
    assert is_the_same("recipes", earlier)


@pytest.mark.parametrize("earlier", NEED_MEGATRON)
def test_an_earlier_path_of_what_needs_megatron_is_found(earlier: str) -> None:
    spec = find_spec(f"recipes.{earlier}")
    home = HOMES_OF_RECIPES[earlier].replace(".", "/")
    assert spec is not None and spec.origin == str(ROOT / "recipes" / f"{home}.py")


def test_a_second_copy_of_a_module_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("uccl_ep_train.settings.checks")
    assert spec is not None and spec.loader is not None
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    monkeypatch.setitem(sys.modules, "uccl_ep_train.config_checks", copy)
    assert not is_the_same("uccl_ep_train", "config_checks")


def test_the_earlier_path_may_come_first_or_second_in_a_process() -> None:
    for first, second in (("config", "settings.config"), ("settings.config", "config")):
        code = (
            f"import uccl_ep_train.{first} as one, uccl_ep_train.{second} as two, uccl_ep_train;"
            "assert one is two and uccl_ep_train.config is one and one.__name__ == one.__spec__.name"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_modules_are_attributes_of_the_package_as_well() -> None:
    from uccl_ep_train.settings import env

    assert uccl_ep_train.env is env
    assert not hasattr(uccl_ep_train, "nothing")


def test_what_was_pickled_by_an_earlier_path_is_read() -> None:
    config = EpConfig(num_experts=8, hidden=256)
    today = pickle.dumps(config, protocol=0)
    earlier = today.replace(b"uccl_ep_train.settings.config", b"uccl_ep_train.config")
    assert earlier != today and pickle.loads(earlier) == config


@pytest.mark.parametrize("command", ["env", "doctor", "trace", "calibrate"])
def test_a_command_starts_by_its_short_name(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"uccl_ep_train.{command}", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert f"usage: python -m uccl_ep_train.{command}" in printed, printed


def test_pages_and_scripts_name_only_paths_that_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").glob("*/*.yaml")]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"\buccl_ep_train(?:\.[a-z_0-9]+)+", text))
    assert {"uccl_ep_train.doctor", "uccl_ep_train.megatron.launch"} <= named
    assert [name for name in sorted(named) if find_spec(name) is None] == []


def test_without_the_finder_there_are_no_earlier_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, EarlierPaths)])
    monkeypatch.delitem(sys.modules, "uccl_ep_train.config", raising=False)
    assert find_spec("uccl_ep_train.config") is None


def test_an_unknown_module_is_still_unknown() -> None:
    for name in ("nothing", "doctor.nothing"):
        with pytest.raises(ModuleNotFoundError, match=rf"uccl_ep_train\.{name}"):
            importlib.import_module(f"uccl_ep_train.{name}")
