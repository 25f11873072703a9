"""Aliases of old import paths, which still work: `uccl_ep_train.config` is the same module
object as `uccl_ep_train.settings.config`. So do commands, `python -m uccl_ep_train.doctor`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

HOMES: Mapping[str, str] = {
    "answers": "group.answers",
    "autograd": "core.autograd",
    "bootstrap": "group.bootstrap",
    "calibrate": "tools.calibrate",
    "calls": "core.calls",
    "config": "settings.config",
    "config_checks": "settings.checks",
    "config_fields": "settings.fields",
    "config_sections": "settings.sections",
    "cuda": "core.cuda",
    "doctor": "tools.doctor",
    "ends": "group.ends",
    "engine": "api.buffer",
    "env": "settings.env",
    "explain": "group.explain",
    "fp8": "oracle.fp8",
    "handle": "common.handle",
    "launch": "core.operations",
    "leftovers": "group.leftovers",
    "lifecycle": "group.lifecycle",
    "limits": "common.limits",
    "native": "core.native",
    "opaque": "common.opaque",
    "patience": "group.patience",
    "pending": "core.pending",
    "presence": "group.presence",
    "reference": "oracle.reference",
    "reference_plan": "oracle.plan",
    "routing": "core.routing",
    "stats": "core.stats",
    "topology": "group.domains",
    "trace": "api.trace",
    "transport": "group.transport",
    "variables": "settings.variables",
    "windows": "group.windows",
}
"""The earlier name of each module of this package, and where it lies in the package."""


class EarlierPaths(MetaPathFinder):
    """Finds modules of a package by their earlier names, and what lies below them."""

    def __init__(self, package: str, homes: Mapping[str, str]) -> None:
        self._prefix = f"{package}."
        self._homes = homes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        name, dot, below = fullname.removeprefix(self._prefix).partition(".")
        home = self._homes.get(name)
        actual = find_spec(f"{self._prefix}{home}{dot}{below}") if home else None
        if actual is None:
            return None
        spec = ModuleSpec(fullname, _Same(actual), origin=actual.origin)
        spec.submodule_search_locations = actual.submodule_search_locations
        return spec


class _Same(InspectLoader):
    """Loads a module under a second name: the same object, which keeps its own name."""

    def __init__(self, actual: ModuleSpec) -> None:
        self._actual = actual

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._actual.name)

    def exec_module(self, module: ModuleType) -> None:
        """The module has already run. importlib has just given it the spec of the second name."""
        module.__spec__ = self._actual

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        loader = self._actual.loader
        return loader.get_code(self._actual.name) if isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        loader = self._actual.loader
        return loader.get_source(self._actual.name) if isinstance(loader, InspectLoader) else None

    def is_package(self, fullname: str) -> bool:
        return self._actual.submodule_search_locations is not None
