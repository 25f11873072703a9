"""Kinds of configuration values: how values are checked, and how text of the environment is parsed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar, cast, get_args

Value: TypeAlias = bool | int | float | str | Sequence[int] | Sequence[str] | None
"""What a field of a configuration can be given."""

FP8_BLOCK = 128
"""Elements that share one FP8 scale. The last ones of a row may be fewer."""

HIDDEN_UNIT = 32
"""Hidden sizes are multiples of it."""

MAX_RANKS = 65536
MAX_TIMEOUT_S = 1e6
MAX_EXPERTS = 1 << 20
MAX_GPU_RANKS = 2048  # of a group on GPUs: kMaxGpuRanks of csrc/backend/gpu/layout.h
MAX_TOKENS = 65536  # limit per rank in an operation on GPUs
MAX_TOPK = 32
MAX_HIDDEN = 1 << 17
MAX_WINDOW_CHUNKS = 32767  # kMaxRingSlots of csrc/layout/words.h, less one

T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of values.

    check  returns the normalised value or raises ValueError, TypeError or OverflowError
    parse  reads the text of an environment variable or of a command line; raises ValueError
    form   of that text, in words; "": a number of the field's unit
    """

    check: Callable[[object], T]
    parse: Callable[[str], Value] = str
    form: str = ""


def whole(value: object) -> int:
    """An integer of any kind, as an int: NumPy's and an `IntEnum`, too. Raises TypeError; a bool is none."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError("a bool is no number")
    try:
        return int(operator.index(cast(int, value)))
    except RuntimeError as error:  # of a tensor without memory
        raise TypeError(str(error)) from None


def integer(low: int, high: int, *, parse: Callable[[str], int] = int, form: str = "integer") -> Kind[int]:
    def check(value: object) -> int:
        number = whole(value)
        if not low <= number <= high:
            raise ValueError("out of range")
        return number

    return Kind(check, parse, form)


def num_bytes(low: int, high: int) -> Kind[int]:
    return integer(low, high, parse=parse_bytes, form="bytes, or with K, M, G")


def number(low: float, high: float, *, open_low: bool = False) -> Kind[float]:
    def check(value: object) -> float:
        if isinstance(value, bool | str | bytes | bytearray):
            raise TypeError("not a number")
        number = float(cast(float, value))
        if math.isnan(number) or not low <= number <= high or (open_low and number == low):
            raise ValueError("out of range")
        return number

    return Kind(check, float)


def choice(literal: object) -> Kind[str]:
    """One of a `Literal` type's strings."""
    choices: tuple[str, ...] = get_args(literal)

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError("not a string")
        return choices[choices.index(value)]  # the text of a member of `class Wires(str, Enum)` is its name

    return Kind(check, str, " | ".join(choices))


def flag() -> Kind[bool]:
    def check(value: object) -> bool:
        if not isinstance(value, bool):
            raise TypeError("not a boolean")
        return value

    return Kind(check, boolean, "0 | 1")


def optional(inner: Kind[T]) -> Kind[T | None]:
    return replace(
        cast(Kind[T | None], inner), check=lambda value: None if value is None else inner.check(value)
    )


def integers(low: int, high: int, *, form: str) -> Kind[tuple[int, ...]]:
    item = integer(low, high).check

    def check(value: object) -> tuple[int, ...]:
        if isinstance(value, str | bytes):
            raise TypeError("not a sequence of integers")
        numbers = tuple(item(entry) for entry in cast(Sequence[object], value))
        if not numbers:
            raise ValueError("empty")
        return numbers

    return Kind(check, parse_integers, form)


def name_of(max_length: int) -> Kind[str]:
    """A word without spaces, commas and slashes."""

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError("not a string")
        if not 1 <= len(value) <= max_length or any(c.isspace() or c in ",/" for c in value):
            raise ValueError("no name")
        return value

    return Kind(check, str, "name")


def names(*, form: str) -> Kind[tuple[str, ...]]:
    item = name_of(64).check

    def check(value: object) -> tuple[str, ...]:
        if isinstance(value, str | bytes):
            raise TypeError("not a sequence of names")
        checked = tuple(item(entry) for entry in cast(Sequence[object], value))
        if not checked:
            raise ValueError("empty")
        return checked

    return Kind(check, parse_names, form)


def hidden_size() -> Kind[int]:
    inner = integer(HIDDEN_UNIT, MAX_HIDDEN).check

    def check(value: object) -> int:
        number = inner(value)
        if number % HIDDEN_UNIT:
            raise ValueError("not a multiple of the unit")
        return number

    return Kind(check, int, "integer")


def permutation() -> Kind[tuple[int, ...]]:
    inner = integers(0, MAX_RANKS - 1, form="group ranks: 1,0")

    def check(value: object) -> tuple[int, ...]:
        numbers = inner.check(value)
        if sorted(numbers) != list(range(len(numbers))):
            raise ValueError("not a permutation")
        return numbers

    return replace(inner, check=check)


def parse_integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace(",", " ").split())


def parse_names(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def parse_bytes(text: str) -> int:
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
