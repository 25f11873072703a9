"""The only module that reads the environment, from one table. `python -m uccl_ep_train.env` prints it.

Variables that operators of UCCL-EP set already mean the same here, beside our own `UCCL_EP_*`.

Nothing of this package is imported at the top, and nothing outside the standard library: `setup.py` runs this
file before the package exists.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "UCCL_EP_"
FAMILY_PREFIX = "UCCL_"


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace(",", " ").split())


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _bytes(text: str) -> int:
    """'536870912', '512M', '1G': powers of 1024."""
    units = {"K": 10, "M": 20, "G": 30}
    stripped = text.strip().upper().removesuffix("IB")
    if stripped and stripped[-1] in units:
        return int(stripped[:-1]) << units[stripped[-1]]
    return int(stripped)


def boolean(text: str) -> bool:
    if text.strip() not in ("0", "1"):
        raise ValueError("neither 0 nor 1")
    return text.strip() == "1"


@dataclass(frozen=True)
class Variable:
    """A variable: its name, the `EpConfig` field it sets ("" for none), parser, form in words, meaning.

    no_effect  why a variable of UCCL-EP does nothing here; "" if it does something
    """

    name: str
    field: str
    parse: Callable[[str], Any]
    form: str
    meaning: str = ""
    no_effect: str = ""


def _config(field: str, parse: Callable[[str], Any], form: str) -> Variable:
    return Variable(name=PREFIX + field.upper(), field=field, parse=parse, form=form)


def _theirs(name: str, field: str, parse: Callable[[str], Any], form: str) -> Variable:
    meaning = f"of UCCL-EP; as {PREFIX}{field.upper()}"
    return Variable(FAMILY_PREFIX + name, field, parse, form, meaning)


def _idle(name: str, why: str) -> Variable:
    return Variable(FAMILY_PREFIX + name, "", str, "", f"of UCCL-EP; no effect here: {why}", why)


# `num_experts`, `hidden` and `source_order` are absent: the model decides them, not the environment.
VARIABLES: tuple[Variable, ...] = (
    _config("dispatch_dtype", str, "fp8 | bf16"),
    _config("grad_dtype", str, "bf16 | fp8"),
    _config("combine_wire_dtype", str, "bf16 | fp32"),
    _config("fp8_scale", str, "pow2 | fp32"),
    _config("max_dtype", str, "bf16 | fp32"),
    _config("budget_bytes", _bytes, "bytes, or with K, M, G"),
    _config("window_tokens", int, "integer"),
    _config("chunk_bytes", _bytes, "bytes, or with K, M, G"),
    _config("window_chunks", int, "integer"),
    _config("arrival_timeout_s", float, "seconds"),
    _config("progress_timeout_s", float, "seconds"),
    _config("backend", str, "auto | host | cuda"),
    _config("num_sms", int, "integer"),
    _config("stage_sms", int, "integer"),
    _config("bulk_copies", boolean, "0 | 1"),
    _config("domain_size", int, "ranks"),
    _config("domains", _integers, "domain id per rank: 0,0,1,1"),
    _config("transport", str, "auto | loop | verbs | ofi"),
    _config("nics", _names, "names: mlx5_0,mlx5_1"),
    _config("nic_window_bytes", _bytes, "bytes, or with K, M, G"),
    _config("nic_window_ops", int, "integer"),
    _config("ib_gid_index", int, "integer"),
    _config("ib_service_level", int, "integer"),
    _config("ib_traffic_class", int, "integer"),
    _config("ofi_provider", str, "name"),
    _config("net_interface", str, "name"),
    _config("loop_gbytes_per_s", float, "10^9 bytes/s"),
    _config("loop_latency_us", float, "microseconds"),
    _config("loop_seed", int, "integer"),
    _config("loop_refuse_rate", float, "fraction"),
    _config("loop_duplicate_rate", float, "fraction"),
    _config("loop_drop_peer", int, "group rank"),
    _config("num_proxies", int, "integer"),
    _theirs("IB_GID_INDEX", "ib_gid_index", int, "integer"),
    _theirs("IB_SL", "ib_service_level", int, "integer"),
    _theirs("IB_TC", "ib_traffic_class", int, "integer"),
    _theirs("IB_MAX_INFLIGHT_BYTES", "nic_window_bytes", _bytes, "bytes, or with K, M, G"),
    _theirs("IB_MAX_INFLIGHT_NORMAL", "nic_window_ops", int, "integer"),
    _theirs("SOCKET_IFNAME", "net_interface", str, "name"),
    _idle("IB_MAX_INFLIGHT_LOW_LATENCY", "there is one mode, for which UCCL_IB_MAX_INFLIGHT_NORMAL counts"),
    _idle("EP_ENABLE_AGGRESSIVE_ATOMIC", "flags are always published by release and read by acquire"),
    _idle("RDMA_ADAPTIVE_SLEEP", "an idle proxy always goes to sleep"),
    Variable(
        PREFIX + "WINDOWS_FILE", "", str, "path", "where measured windows of NICs are kept (calibrate.py)"
    ),
    Variable(PREFIX + "WERROR", "", int, "0 | 1", "build only: compiler warnings are errors"),
    Variable(
        PREFIX + "CUDA_ARCHS",
        "",
        str,
        "auto | all | none | names",
        "build only: the GPU architectures that kernels are compiled for, see `csrc/architectures.py`",
    ),
    Variable(PREFIX + "SANITIZE", "", str, "address | undefined | thread", "build only: see CONTRIBUTING.md"),
    Variable(PREFIX + "APT", "", int, "0 | 1", "scripts/setup_env.sh only: it may install system packages"),
    Variable(PREFIX + "TORCH_SPEC", "", str, "requirement", "scripts/setup_env.sh only: which torch"),
    Variable(PREFIX + "PIP_ARGS", "", str, "options", "scripts/setup_env.sh only: options of pip"),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}
FIELDS = {entry.field: entry for entry in VARIABLES if entry.field and entry.name.startswith(PREFIX)}
"""Our own variable of each field that can be set from outside."""

_warned: set[str] = set()


@dataclass(frozen=True)
class Setting:
    """What the environment says of a field: the variable, and its value, parsed but not validated."""

    variable: Variable
    value: Any


def settings(environ: Mapping[str, str] | None = None) -> dict[str, Setting]:
    """`EpConfig` fields set by the environment. An empty variable counts as not set.

    Raises `ConfigError` naming variable and value where a value cannot be parsed, and both variables where
    two set one field to different values; warns once about each unknown `UCCL_*` variable, because a misspelt
    one would otherwise be ignored in silence, and about each that has no effect here.
    """
    environ = os.environ if environ is None else environ
    _warn(environ)
    found: dict[str, Setting] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if not variable.field or not text:
            continue
        value = _parsed(variable, text)
        earlier = found.setdefault(variable.field, Setting(variable, value))
        if earlier.value != value:
            raise _config_error(
                f"environment variables {earlier.variable.name} = {environ[earlier.variable.name]!r} and "
                f"{variable.name} = {text!r} both set {variable.field}: allowed is one of them, or one value"
            )
    return found


def _parsed(variable: Variable, text: str) -> Any:
    try:
        return variable.parse(text)
    except ValueError:
        raise _config_error(
            f"environment variable {variable.name} = {text!r}: allowed is {variable.form}"
        ) from None


def _config_error(message: str) -> Exception:
    from uccl_ep_train.errors import ConfigError

    return ConfigError(message)


def _warn(environ: Mapping[str, str]) -> None:
    for name, text in remarks(environ):
        if name not in _warned:
            _warned.add(name)
            warnings.warn(text, stacklevel=4)


def remarks(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """(variable, what is the matter) of each `UCCL_*` variable that is unknown or has no effect here."""
    environ = os.environ if environ is None else environ
    found = []
    for name in sorted(environ):
        known = _BY_NAME.get(name)
        if not name.startswith(FAMILY_PREFIX) or (known and not known.no_effect):
            continue
        if known is None:
            near = difflib.get_close_matches(name, _BY_NAME, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            text = (
                f"unknown environment variable {name} is ignored; {meant}"
                "`python -m uccl_ep_train.env` lists those that are known"
            )
        else:
            text = f"environment variable {name} has no effect here: {known.no_effect}"
        found.append((name, text))
    return found


def of_family(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The `UCCL_*` variables that are set, known or not."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(environ) if name.startswith(FAMILY_PREFIX)}


def read(name: str, default: str = "") -> str:
    """A variable that belongs to somebody else (RANK, MASTER_ADDR, CUDA_HOME ...)."""
    return os.environ.get(name, default)


def set_default(name: str, value: str) -> None:
    """Sets a variable that another library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def set_value(name: str, value: str) -> None:
    """Sets a variable that another library reads, whatever it was; for processes started later, too."""
    os.environ[name] = value


def warnings_are_errors() -> bool:
    """UCCL_EP_WERROR=1, read by the build."""
    return os.environ.get(PREFIX + "WERROR", "") == "1"


def cuda_architectures() -> str:
    """UCCL_EP_CUDA_ARCHS, read by the build: see `csrc/architectures.py`."""
    return os.environ.get(PREFIX + "CUDA_ARCHS", "auto")


def sanitizer() -> str:
    """UCCL_EP_SANITIZE, read by the build; empty: none."""
    name = os.environ.get(PREFIX + "SANITIZE", "")
    if name not in ("", "address", "undefined", "thread"):
        raise SystemExit(
            f"environment variable {PREFIX}SANITIZE = {name!r}: allowed is address | undefined | thread"
        )
    return name


def table() -> str:
    """Every variable: the value of its field and where that comes from, unit, default, form, meaning.

    A value that is not allowed is shown with what is.
    """
    import dataclasses

    from uccl_ep_train.config import EpConfig

    fields = {entry.name: entry for entry in dataclasses.fields(EpConfig)}
    rows = [("variable", "value", "source", "unit", "default", "form", "meaning")]
    for variable in VARIABLES:
        text = os.environ.get(variable.name, "")
        entry = fields.get(variable.field)
        if entry is None:
            value, source = text or "-", "environment" if text else "-"
            rows.append((variable.name, value, source, "", "", variable.form, variable.meaning))
            continue
        about = entry.metadata["info"]
        value, source = _shown(variable, about, entry.default)
        meaning = variable.meaning or about.reason
        rows.append((variable.name, value, source, about.unit, str(entry.default), variable.form, meaning))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[6]
        for row in rows
    )


def _shown(variable: Variable, about: Any, default: Any) -> tuple[str, str]:
    """Value and source of a variable's field, as `EpConfig.from_env` would have them."""
    own = FIELDS[variable.field]
    setters = [entry for entry in VARIABLES if entry.field == variable.field and os.environ.get(entry.name)]
    if not setters:
        return str(default), "default"
    values, refused = [], ""
    for setter in setters:
        try:
            values.append(about.check(setter.parse(os.environ[setter.name])))
        except (ValueError, TypeError, OverflowError):
            refused = f"{os.environ[setter.name]} (refused: allowed is {about.allowed})"
    names = " and ".join(setter.name for setter in setters)
    if refused:
        return refused, f"environment {names}"
    if any(value != values[0] for value in values):
        return f"refused: {names} differ", f"environment {names}"
    return str(values[0]), f"environment {setters[0].name if own in setters else names}"


if __name__ == "__main__":
    print(table())
