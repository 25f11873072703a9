"""What a field of `EpConfig` carries besides its value (unit, range, reason) and the checks of its value."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROW_BLOCK = 128
"""Elements that share one FP8 scale; hidden sizes are multiples of it."""

MAX_RANKS = 65536
MAX_TOKENS = 65536  # of a rank in an operation on GPUs
MAX_TOPK = 32


@dataclass(frozen=True)
class FieldInfo:
    """What a reader of a field has to know.

    unit     of the value
    allowed  the range in words, repeated by the error
    reason   why one would set it
    check    returns the normalised value or raises ValueError/TypeError
    agree    True: has to be equal on every rank of the group
    """

    unit: str
    allowed: str
    reason: str
    check: Callable[[Any], Any]
    agree: bool = True


def integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError("a bool is no number")
        number = operator.index(value)
        if not low <= number <= high:
            raise ValueError("out of range")
        return number

    return check


def number(low: float, high: float, *, open_low: bool = False) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if isinstance(value, bool | str):
            raise TypeError("not a number")
        number = float(value)
        if math.isnan(number) or not low <= number <= high or (open_low and number == low):
            raise ValueError("out of range")
        return number

    return check


def choice(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError("unknown choice")
        return str(value)

    return check


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not a boolean")
    return value


def optional(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else inner(value)


def integers(low: int, high: int) -> Callable[[Any], tuple[int, ...]]:
    item = integer(low, high)

    def check(value: Any) -> tuple[int, ...]:
        if isinstance(value, str | bytes):
            raise TypeError("not a sequence of integers")
        numbers = tuple(item(entry) for entry in value)
        if not numbers:
            raise ValueError("empty")
        return numbers

    return check


def name_of(max_length: int) -> Callable[[Any], str]:
    """A word without spaces, commas and slashes."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError("not a string")
        if not 1 <= len(value) <= max_length or any(c.isspace() or c in ",/" for c in value):
            raise ValueError("no name")
        return value

    return check


def names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str | bytes):
        raise TypeError("not a sequence of names")
    checked = tuple(name_of(64)(entry) for entry in value)
    if not checked:
        raise ValueError("empty")
    return checked


def hidden_size(value: Any) -> int:
    number = integer(ROW_BLOCK, 1 << 17)(value)
    if number % ROW_BLOCK:
        raise ValueError("not a multiple of the block")
    return number


def permutation(value: Any) -> tuple[int, ...]:
    numbers = integers(0, MAX_RANKS - 1)(value)
    if sorted(numbers) != list(range(len(numbers))):
        raise ValueError("not a permutation")
    return numbers


def info(
    unit: str, allowed: str, reason: str, check: Callable[[Any], Any], *, agree: bool = True
) -> dict[str, FieldInfo]:
    return {"info": FieldInfo(unit=unit, allowed=allowed, reason=reason, check=check, agree=agree)}
