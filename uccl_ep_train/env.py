"""The only module that reads the environment, from one table. `python -m uccl_ep_train.env` prints it.

Nothing of this package is imported at the top, and nothing outside the standard library: `setup.py` runs this
file before the package exists.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "UCCL_EP_"


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace(",", " ").split())


def _bytes(text: str) -> int:
    """'536870912', '512M', '1G': powers of 1024."""
    units = {"K": 10, "M": 20, "G": 30}
    stripped = text.strip().upper().removesuffix("IB")
    if stripped and stripped[-1] in units:
        return int(stripped[:-1]) << units[stripped[-1]]
    return int(stripped)


def _boolean(text: str) -> bool:
    if text.strip() not in ("0", "1"):
        raise ValueError("neither 0 nor 1")
    return text.strip() == "1"


@dataclass(frozen=True)
class Variable:
    """A variable: its name, the `EpConfig` field it sets ("" for none), parser, form in words, meaning."""

    name: str
    field: str
    parse: Callable[[str], Any]
    form: str
    meaning: str = ""


def _config(field: str, parse: Callable[[str], Any], form: str) -> Variable:
    return Variable(name=PREFIX + field.upper(), field=field, parse=parse, form=form)


# `num_experts`, `hidden` and `source_order` are absent: the model decides them, not the environment.
VARIABLES: tuple[Variable, ...] = (
    _config("dispatch_dtype", str, "fp8 | bf16"),
    _config("grad_dtype", str, "bf16 | fp8"),
    _config("combine_wire_dtype", str, "bf16 | fp32"),
    _config("fp8_scale", str, "pow2 | fp32"),
    _config("max_dtype", str, "bf16 | fp32"),
    _config("budget_bytes", _bytes, "bytes, or with K, M, G"),
    _config("chunk_bytes", _bytes, "bytes, or with K, M, G"),
    _config("window_chunks", int, "integer"),
    _config("arrival_timeout_s", float, "seconds"),
    _config("progress_timeout_s", float, "seconds"),
    _config("backend", str, "auto | host | cuda"),
    _config("num_sms", int, "integer"),
    _config("stage_sms", int, "integer"),
    _config("bulk_copies", _boolean, "0 | 1"),
    _config("domain_size", int, "ranks"),
    _config("domains", _integers, "domain id per rank: 0,0,1,1"),
    _config("transport", str, "auto | loop"),
    _config("loop_gbytes_per_s", float, "10^9 bytes/s"),
    _config("loop_latency_us", float, "microseconds"),
    _config("loop_seed", int, "integer"),
    _config("loop_refuse_rate", float, "fraction"),
    _config("loop_duplicate_rate", float, "fraction"),
    _config("loop_drop_peer", int, "group rank"),
    _config("num_proxies", int, "integer"),
    Variable(PREFIX + "WERROR", "", int, "0 | 1", "build only: compiler warnings are errors"),
    Variable(PREFIX + "SANITIZE", "", str, "address | undefined | thread", "build only: see CONTRIBUTING.md"),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}
_BY_FIELD = {variable.field: variable for variable in VARIABLES if variable.field}
_warned: set[str] = set()


def variable_of_field(field: str) -> Variable | None:
    """The variable that sets a field of `EpConfig`, or None."""
    return _BY_FIELD.get(field)


def config_values(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`EpConfig` fields set by the environment, parsed but not validated. An empty value counts as not set.

    Raises `ConfigError` naming variable and value where a value cannot be parsed; warns once about each
    unknown `UCCL_EP_*` variable, because a misspelt one would otherwise be ignored in silence.
    """
    environ = os.environ if environ is None else environ
    _warn_unknown(environ)
    values = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if not variable.field or not text:
            continue
        try:
            values[variable.field] = variable.parse(text)
        except ValueError:
            from uccl_ep_train.errors import ConfigError

            raise ConfigError(
                f"environment variable {variable.name} = {text!r}: allowed is {variable.form}"
            ) from None
    return values


def _warn_unknown(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in _BY_NAME and name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"unknown environment variable {name} is ignored; known are: {', '.join(_BY_NAME)}",
                stacklevel=3,
            )


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


def sanitizer() -> str:
    """UCCL_EP_SANITIZE, read by the build; empty: none."""
    name = os.environ.get(PREFIX + "SANITIZE", "")
    if name not in ("", "address", "undefined", "thread"):
        raise SystemExit(
            f"environment variable {PREFIX}SANITIZE = {name!r}: allowed is address | undefined | thread"
        )
    return name


def table() -> str:
    """Every variable with its form, the default of its field, its present value and its meaning."""
    import dataclasses

    from uccl_ep_train.config import EpConfig

    fields = {entry.name: entry for entry in dataclasses.fields(EpConfig)}
    rows = [("variable", "form", "default", "now", "meaning")]
    for variable in VARIABLES:
        entry = fields.get(variable.field)
        default = str(entry.default) if entry else ""
        meaning = entry.metadata["info"].reason if entry else variable.meaning
        rows.append((variable.name, variable.form, default, os.environ.get(variable.name, "-"), meaning))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[4]
        for row in rows
    )


if __name__ == "__main__":
    print(table())
