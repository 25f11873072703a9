"""How a configuration field is declared, and how its declaration is read.

    num_sms: int = setting(24, integer(1, 1024))
    \"\"\"Streaming multiprocessors that the kernels may occupy.

    Unit: SMs. Allowed: 1 .. 1024.
    \"\"\"

An editor shows the text below a field. The same text, read from the source, is what errors, `describe()`,
`python -m uccl_ep_train.env` and `--help` print.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self, TypeVar, cast

from uccl_ep_train.common.shown import shown
from uccl_ep_train.errors import ConfigError
from uccl_ep_train.settings.checks import Kind, Value

PREFIX = "UCCL_EP_"
_TEXT = re.compile(r"(?P<reason>.*?) (?:Unit: (?P<unit>\S.*?)\. )?Allowed: (?P<allowed>.*)\.", re.DOTALL)

T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """The parts of a declaration besides name, type, default and text.

    kind    of the values
    agree   True: must be equal on every rank of the group
    native  where the native `EngineConfig` has the value, "nic.window_ops"; "=": by the field's own name;
            "": nowhere. A value of None leaves what is there, which says the same
    theirs  UCCL-EP's variable of the same meaning, without UCCL_; "": none
    """

    kind: Kind[object]
    agree: bool
    native: str
    theirs: str


@dataclass(frozen=True)
class FieldInfo:
    """Documentation of a field: the unit of its value, its range in words, why one would set it."""

    unit: str
    allowed: str
    reason: str


def setting(
    default: T, kind: Kind[T] | Kind[str], *, agree: bool = True, native: str = "", theirs: str = ""
) -> T:
    """A field; see `Spec`."""
    spec = Spec(cast(Kind[object], kind), agree, native, theirs)
    return dataclasses.field(default=default, metadata={"spec": spec})


def required(kind: Kind[T], *, native: str = "") -> T:
    """A field without default."""
    return cast(T, dataclasses.field(metadata={"spec": Spec(cast(Kind[object], kind), True, native, "")}))


@cache
def field_texts(owner: type) -> dict[str, FieldInfo]:
    """The text below each field of a class. Empty where the package is installed without source."""
    found = {}
    for declared, below in itertools.pairwise(_bodies(owner.__module__).get(owner.__name__, [])):
        if not (isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            match = _TEXT.fullmatch(" ".join(str(below.value.value).split()))
            if match:
                reason = match["reason"].removesuffix(".")
                found[declared.target.id] = FieldInfo(match["unit"] or "", match["allowed"], reason)
    return found


@cache
def _bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Of each class of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


@dataclass(frozen=True)
class Setting:
    """A field by its public name, unique in a configuration: `num_sms` of `gpu.num_sms`.

    owner    class that declares it
    section  field of `EpConfig` that holds it; "": `EpConfig` itself
    field    of the owner
    """

    owner: type
    section: str
    field: str
    name: str
    default: object
    spec: Spec

    @property
    def path(self) -> str:
        return f"{self.section}.{self.field}" if self.section else self.field

    @property
    def variable(self) -> str:
        """The one rule for names of environment variables."""
        return PREFIX + self.name.upper()

    @property
    def native(self) -> str:
        return self.field if self.spec.native == "=" else self.spec.native

    @property
    def form(self) -> str:
        return self.spec.kind.form or self.info.unit

    @property
    def info(self) -> FieldInfo:
        unknown = FieldInfo("", "what the documentation says", "")
        return field_texts(self.owner).get(self.field, unknown)

    def of(self, config: object) -> Value:
        holder = getattr(config, self.section) if self.section else config
        return cast(Value, getattr(holder, self.field))

    def checked(self, value: object) -> object:
        """`value`, normalised. Raises `ConfigError` naming the field, the value and what is allowed."""
        try:
            return self.spec.kind.check(value)
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{self.name} = {shown(value)}: allowed is {self.info.allowed}") from None


def settings_of(owner: type, section: str = "") -> tuple[Setting, ...]:
    """The fields of a dataclass that `setting` declares."""
    prefix = getattr(owner, "prefix", "")
    return tuple(
        Setting(owner, section, entry.name, prefix + entry.name, entry.default, entry.metadata["spec"])
        for entry in dataclasses.fields(owner)
        if "spec" in entry.metadata
    )


class Section:
    """Base of frozen keyword-only dataclasses of settings: checks values and records which were given."""

    prefix: ClassVar[str] = ""
    """Before a field's name in its public name."""

    given: frozenset[str]
    """Fields that the constructor was given; the others have their defaults."""

    def __new__(cls, *_: object, **given: object) -> Self:
        self = super().__new__(cls)
        # Not a field: two sections with equal values are equal, whatever their sources.
        object.__setattr__(self, "given", frozenset(given))
        return self

    def __post_init__(self) -> None:
        for entry in settings_of(type(self)):
            object.__setattr__(self, entry.field, entry.checked(getattr(self, entry.field)))
