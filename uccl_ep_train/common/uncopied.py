"""Objects that belong to one process."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex, TypeVar

from uccl_ep_train.errors import InputError

Own = TypeVar("Own", bound="Frozen")


class Uncopied:
    """Has no copies: neither by `copy` nor by `pickle`, for example of a module that holds it.

    instead  what a caller may do; None: create a new one
    """

    __slots__ = ()
    instead: ClassVar[str | None] = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        article = "an" if kind.startswith("E") else "a"
        instead = self.instead or f"to create a new {kind}"
        raise InputError(f"{article} {kind} has no copies, also not in a module; allowed is {instead}")


class Frozen:
    """Does not change, so in its process it is its own copy. It has none in other processes, nor in files."""

    __slots__ = ()

    def __copy__(self: Own) -> Own:
        return self

    def __deepcopy__(self: Own, memo: object) -> Own:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise InputError(
            f"a {kind} has no copies in other processes and files; allowed is a dispatch where it is used"
        )
