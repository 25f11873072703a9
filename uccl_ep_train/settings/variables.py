"""The table of environment variables, and the settings that the environment gives.

Names, forms and meanings of `UCCL_EP_*` come from the settings that `sections.py` declares. Variables of
UCCL-EP keep their meaning here.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from uccl_ep_train.common.shown import cut, shown
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings import env
from uccl_ep_train.settings.checks import MAX_RANKS, Value
from uccl_ep_train.settings.env import FAMILY_PREFIX
from uccl_ep_train.settings.fields import PREFIX, Setting
from uccl_ep_train.settings.sections import SETTINGS


@dataclass(frozen=True)
class Variable:
    """A variable of the table.

    setting    that it sets; None: it is not part of a configuration
    no_effect  why a variable of UCCL-EP does nothing here; "" if it does something
    """

    name: str
    setting: Setting | None = None
    form: str = ""
    meaning: str = ""
    no_effect: str = ""

    @property
    def field(self) -> str:
        """The public name of what it sets; "" for nothing."""
        return "" if self.setting is None else self.setting.name


def _own(setting: Setting) -> Variable:
    return Variable(setting.variable, setting, setting.form, setting.info.reason)


def _theirs(setting: Setting) -> Variable:
    meaning = f"of UCCL-EP; as {setting.variable}"
    return Variable(FAMILY_PREFIX + setting.spec.theirs, setting, setting.form, meaning)


def _idle(name: str, why: str) -> Variable:
    return Variable(FAMILY_PREFIX + name, None, "", f"of UCCL-EP; no effect here: {why}", why)


def _other(name: str, form: str, meaning: str) -> Variable:
    return Variable(PREFIX + name, None, form, meaning)


VARIABLES: tuple[Variable, ...] = (
    *map(_own, SETTINGS.values()),
    *(_theirs(setting) for setting in SETTINGS.values() if setting.spec.theirs),
    _idle("IB_MAX_INFLIGHT_LOW_LATENCY", "there is one mode, for which UCCL_IB_MAX_INFLIGHT_NORMAL counts"),
    _idle("EP_ENABLE_AGGRESSIVE_ATOMIC", "flags are always published by release and read by acquire"),
    _idle("RDMA_ADAPTIVE_SLEEP", "an idle proxy always goes to sleep"),
    _other("WINDOWS_FILE", "path", "where measured windows of NICs are kept (calibrate.py)"),
    _other("WERROR", "0 | 1", "build only: compiler warnings are errors"),
    _other("CUDA_ARCHS", "auto | all | none | names", "build only: GPUs that kernels are compiled for"),
    _other("SANITIZE", "address | undefined | thread", "build only: see CONTRIBUTING.md"),
    _other("APT", "0 | 1", "scripts/setup_env.sh only: it may install system packages"),
    _other("TORCH_SPEC", "requirement", "scripts/setup_env.sh only: which torch"),
    _other("PIP_ARGS", "options", "scripts/setup_env.sh only: options of pip"),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}

_warned: set[str] = set()


@dataclass(frozen=True)
class Said:
    """A setting from the environment: the variable and its value, parsed but not validated."""

    variable: Variable
    value: Value


def said() -> dict[str, Said]:
    """The settings that the environment gives, by public name. An empty variable counts as not set.

    Raises `ConfigError` naming variable and value where a value cannot be parsed, and both variables where
    two set one field to different values; warns once about each unknown `UCCL_*` variable, because a misspelt
    one would otherwise be ignored in silence, and about each that has no effect here.
    """
    texts = env.of_family()
    _warn(texts)
    found: dict[str, Said] = {}
    for variable in VARIABLES:
        text = texts.get(variable.name, "")
        if variable.setting is None or not text:
            continue
        try:
            value = variable.setting.spec.kind.parse(text)
        except ValueError:
            raise ConfigError(
                f"environment variable {variable.name} = {shown(text)}: allowed is {variable.form}"
            ) from None
        earlier = found.setdefault(variable.field, Said(variable, value))
        if earlier.value != value:
            raise ConfigError(
                f"environment variables {earlier.variable.name} = {shown(texts[earlier.variable.name])} and "
                f"{variable.name} = {shown(text)} both set {variable.field}: allowed is one of them, or "
                "one value"
            )
    return found


def of_launcher(name: str, default: int, least: int, most: int = MAX_RANKS) -> int:
    """A number that torchrun or another launcher gives: RANK, MASTER_PORT ... Empty counts as not set.

    Raises `ConfigError` naming variable and value.
    """
    text = env.read(name)
    try:
        number = int(text) if text else default
        if least <= number <= most:
            return number
    except ValueError:
        pass
    raise ConfigError(f"environment variable {name} = {shown(text)}: allowed is {least} .. {most}")


def _warn(texts: Mapping[str, str]) -> None:
    for name, text in remarks(texts):
        if name not in _warned:
            _warned.add(name)
            warnings.warn(text, stacklevel=4)


def remarks(texts: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """(variable, problem) for each `UCCL_*` variable that is unknown or has no effect here."""
    found = []
    for name in env.of_family() if texts is None else texts:
        known = _BY_NAME.get(name)
        if known is None:
            near = difflib.get_close_matches(name, _BY_NAME, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            text = (
                f"unknown environment variable {name} is ignored; {meant}"
                "`python -m uccl_ep_train.env` lists those that are known"
            )
        elif known.no_effect:
            text = f"environment variable {name} has no effect here: {known.no_effect}"
        else:
            continue
        found.append((name, text))
    return found


def table() -> str:
    """Every variable: the value of its field and its source, unit, default, form, meaning.

    A value that is not allowed is shown with the allowed ones.
    """
    rows = [("variable", "value", "source", "unit", "default", "form", "meaning")]
    for variable in VARIABLES:
        setting = variable.setting
        if setting is None:
            text = env.read(variable.name)
            value, source = _in_line(text) or "-", "environment" if text else "-"
            rows.append((variable.name, value, source, "", "", variable.form, variable.meaning))
            continue
        value, source = _shown(setting)
        unit, default = setting.info.unit, str(setting.default)
        rows.append((variable.name, value, source, unit, default, variable.form, variable.meaning))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[6]
        for row in rows
    )


def _in_line(text: str) -> str:
    """As it is, where it fits into a line of the table."""
    return cut(text) if text.isprintable() else shown(text)


def _shown(setting: Setting) -> tuple[str, str]:
    """Value and source of a setting, as `EpConfig.from_env` would have them."""
    setters = [entry.name for entry in VARIABLES if entry.setting is setting and env.read(entry.name)]
    if not setters:
        return str(setting.default), "default"
    values, refused = [], ""
    for name in setters:
        text, kind = env.read(name), setting.spec.kind
        try:
            values.append(kind.check(kind.parse(text)))
        except (ValueError, TypeError, OverflowError):
            refused = f"{_in_line(text)} (refused: allowed is {setting.info.allowed})"
    names = " and ".join(setters)
    if refused:
        return refused, f"environment {names}"
    if any(value != values[0] for value in values):
        return f"refused: {names} differ", f"environment {names}"
    # The name with UCCL_EP_ comes first.
    return cut(str(values[0])), f"environment {setters[0] if setting.variable in setters else names}"
