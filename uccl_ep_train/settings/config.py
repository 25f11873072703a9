"""`EpConfig`: the configuration of a buffer. `sections.py` declares all settings that do not describe the
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from uccl_ep_train.common.shown import shown
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings import variables
from uccl_ep_train.settings.checks import MAX_EXPERTS, Value, hidden_size, integer, optional, permutation
from uccl_ep_train.settings.fields import Section, Setting, required, setting, settings_of
from uccl_ep_train.settings.sections import (
    SECTIONS,
    SETTINGS,
    SETTINGS_OF,
    Deadlines,
    Gpu,
    LoopFaults,
    Memory,
    Network,
    Wire,
)

__all__ = ["Deadlines", "EpConfig", "Gpu", "LoopFaults", "Memory", "Network", "Wire"]


class _FlatName:
    """`config.num_sms`, which is `config.gpu.num_sms`; of the class: the default."""

    def __init__(self, of: Setting) -> None:
        self._of = of
        self.__doc__ = of.path

    def __get__(self, config: EpConfig | None, owner: type[EpConfig]) -> object:
        return self._of.default if config is None else self._of.of(config)


@dataclass(frozen=True, kw_only=True, init=False)
class EpConfig(Section):
    """Configuration of one `Buffer`. Frozen, hashable; validated on construction.

        EpConfig(num_experts=64, hidden=4096, gpu=Gpu(num_sms=32), deadlines=Deadlines(progress_timeout_s=60))

    Every setting of a section has a public name of its own. It works as an argument, as an attribute and in
    `replace`, too: `EpConfig(num_experts=64, hidden=4096, num_sms=32).num_sms`. It is the field's name, after
    "loop_" for those of `LoopFaults`.

    `describe()` prints all values with their units and sources. Settings marked "ranks agree" there
    must be equal on all ranks of the group, which is checked when the buffer is created.

    Raises `ConfigError` naming the setting, the value and what is allowed, also if a setting is given by both
    names.
    """

    num_experts: int = required(integer(1, MAX_EXPERTS), native="=")
    """Experts of the whole group; expert e belongs to group rank e // (num_experts / ranks).

    Unit: experts. Allowed: 1 .. 2^20, divisible by the number of ranks.
    """

    hidden: int = required(hidden_size(), native="=")
    """Largest row length used on this buffer; slots are sized for it.

    Unit: elements. Allowed: a multiple of 32, 32 .. 131072.
    """

    source_order: tuple[int, ...] | None = setting(None, optional(permutation()), native="=")
    """Order of the sources inside an expert's rows; None: ascending group rank.

    Unit: group ranks. Allowed: None, or a permutation of the group's ranks.
    """

    wire: Wire
    """How values are written on their way."""

    memory: Memory
    """What a buffer may allocate on this rank, and how it divides it."""

    deadlines: Deadlines
    """How long a rank waits for others before it raises."""

    gpu: Gpu
    """Whether tensors lie on a GPU, and what the kernels may take of it."""

    network: Network
    """Which ranks are a domain, and how rows travel between domains."""

    faults: LoopFaults
    """What makes the loop transport slow or faulty."""

    if TYPE_CHECKING:
        _sources: Mapping[str, str]

        def __getattr__(self, name: str) -> Value:
            """Settings by their public names."""

    def __init__(
        self,
        *,
        num_experts: int,
        hidden: int,
        source_order: Sequence[int] | None = None,
        wire: Wire | None = None,
        memory: Memory | None = None,
        deadlines: Deadlines | None = None,
        gpu: Gpu | None = None,
        network: Network | None = None,
        faults: LoopFaults | None = None,
        **flat: Value,
    ) -> None:
        sections = (wire, memory, deadlines, gpu, network, faults)
        values = by_public_name(flat | dict(zip(SECTIONS, sections, strict=True)))
        for name, value in (("num_experts", num_experts), ("hidden", hidden), ("source_order", source_order)):
            object.__setattr__(self, name, value)
        for name, owner in SECTIONS.items():
            own = {entry.field: entry.name for entry in SETTINGS_OF[name]}
            given = {field: values.pop(public) for field, public in own.items() if public in values}
            object.__setattr__(self, name, owner(**given))
        if values:
            raise TypeError(f"EpConfig.__init__() got an unexpected keyword argument {next(iter(values))!r}")
        self._set_sources({})
        self.__post_init__()
        if self.wire.combine_wire_dtype == "fp32" and self.memory.max_dtype != "fp32":
            raise ConfigError(
                "combine_wire_dtype = 'fp32' with max_dtype = 'bf16': the slots would be too small; "
                "allowed is max_dtype = 'fp32'"
            )

    @classmethod
    def from_env(cls, **given: Value | Section) -> EpConfig:
        """Arguments, else `UCCL_*` variables (`python -m uccl_ep_train.env` lists them), else defaults.

        Raises `ConfigError` for a bad value, naming the variable if it came from the environment, and for two
        variables that set one field to different values.
        """
        unknown = sorted(set(given) - set(SECTIONS) - set(ALL_SETTINGS))
        if unknown:
            allowed = sorted([*SECTIONS, *ALL_SETTINGS])
            raise ConfigError(f"unknown configuration field {shown(unknown[0])}; allowed is one of {allowed}")
        values = by_public_name(given)
        said = {name: found for name, found in variables.said().items() if name not in values}
        if values.get("domain_size") is not None:
            said.pop("domains", None)  # The default would override an argument.
        values |= {name: found.value for name, found in said.items()}
        try:
            config = cls(**values)  # type: ignore[arg-type]
        except ConfigError as error:
            blamed = said.get(str(error).split(" ", 1)[0])
            if blamed is not None:
                raise ConfigError(f"environment variable {blamed.variable.name}: {error}") from None
            raise
        config._set_sources({name: f"environment {found.variable.name}" for name, found in said.items()})
        return config

    def replace(self, **changes: Value | Section) -> Self:
        """A copy with some settings changed, by their public names, or some sections. The sources of the
        others are kept. Raises as the constructor.
        """
        changed = by_public_name(changes)
        kept = {
            entry.name: entry.of(self)
            for entry in self._given()
            if entry.name not in changed and entry.section not in changes
        }
        config = type(self)(**(kept | changed))  # type: ignore[arg-type]
        config._set_sources({name: source for name, source in self._sources.items() if name in kept})
        return config

    def source(self, name: str) -> str:
        """Where a setting's value comes from: "argument", "default", "environment VARIABLE"."""
        given = {entry.name for entry in self._given()}
        return self._sources.get(name, "argument" if name in given else "default")

    def describe(self) -> str:
        """One line per setting: name, value, unit, source of the value, whether ranks must agree, reason."""
        rows = []
        for name, entry in ALL_SETTINGS.items():
            source = self.source(name)
            agree = "ranks agree" if entry.spec.agree else "per rank"
            rows.append((name, shown(entry.of(self)), entry.info.unit, source, agree, entry.info.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[5]
            for row in rows
        )

    def agreed_values(self) -> dict[str, Value]:
        """The settings that must be equal on every rank, by public name, JSON-ready."""
        return {name: entry.of(self) for name, entry in ALL_SETTINGS.items() if entry.spec.agree}

    def _given(self) -> Iterator[Setting]:
        for entry in ALL_SETTINGS.values():
            holder = getattr(self, entry.section) if entry.section else self
            if entry.field in holder.given:
                yield entry

    def _set_sources(self, sources: Mapping[str, str]) -> None:
        """Of values that are no arguments of this program. Not a field, as `given`."""
        object.__setattr__(self, "_sources", dict(sources))


ALL_SETTINGS: dict[str, Setting] = {entry.name: entry for entry in settings_of(EpConfig)} | SETTINGS
"""By public name."""

for _entry in SETTINGS.values():
    setattr(EpConfig, _entry.name, _FlatName(_entry))


def by_public_name(given: Mapping[str, Value | Section]) -> dict[str, Value]:
    """Arguments of `EpConfig` with its sections taken apart: of each what it was given; None is no section.

    Raises `ConfigError` for what is no section, and for a setting that is given by its public name and in its
    section, naming both.
    """
    found: dict[str, Value] = {}
    for name, value in given.items():
        owner = SECTIONS.get(name)
        if owner is None:
            found[name] = value  # type: ignore[assignment]
        elif value is not None and not isinstance(value, owner):
            raise ConfigError(f"{name} = {shown(value)}: allowed is a {owner.__name__}")
    for name, entries in SETTINGS_OF.items():
        section = given.get(name)
        for entry in entries:
            if not isinstance(section, Section) or entry.field not in section.given:
                continue
            value = getattr(section, entry.field)
            if entry.name in found:
                raise ConfigError(
                    f"{entry.name} = {shown(found[entry.name])} and {entry.path} = {shown(value)} are one "
                    "setting: allowed is one of them"
                )
            found[entry.name] = value
    return found


def normalised(given: Mapping[str, Value | Section]) -> dict[str, Value]:
    """As `by_public_name`, and each value as its field would hold it: equal settings compare equal.

    Raises `ConfigError` for a bad value, too. An unknown name stays as it is.
    """
    return {
        name: cast(Value, ALL_SETTINGS[name].checked(value)) if name in ALL_SETTINGS else value
        for name, value in by_public_name(given).items()
    }
