"""Objects that belong to one process."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from uccl_ep_train.errors import InputError


class Uncopied:
    """Has no copies: neither by `copy` nor by `pickle`, for example of a module that holds it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise InputError(f"a {kind} has no copies, also not in a module; allowed is to create a new {kind}")
