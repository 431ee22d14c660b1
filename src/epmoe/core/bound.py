"""Objects that belong to their process, because they hold a group of processes."""

from copy import deepcopy
from typing import NoReturn, Self

from epmoe.core.errors import InputError


class BoundToGroup:
    """Cannot be pickled; can be copied as Python copies by default, where its group can: a single one."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InputError(
            f"a {type(self).__name__} holds a group of processes and cannot be pickled: send weights and settings, and "
            "build it there"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        memo[id(self)] = copied = object.__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied
