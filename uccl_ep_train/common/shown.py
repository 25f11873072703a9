"""How messages show a value that was given."""

from __future__ import annotations

MOST_SHOWN = 200


def shown(value: object) -> str:
    """Its repr, cut where it is long: a variable may have 128 KiB. Never raises."""
    try:
        return cut(repr(value))
    except Exception:  # of an integer of more than 4,300 digits, for one
        return f"a value of {type(value).__name__} that cannot be printed"


def cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"
