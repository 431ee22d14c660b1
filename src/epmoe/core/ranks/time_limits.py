"""How long a run on ranks may take, checked before any rank starts."""

import math

from epmoe.core.errors import InputError


def check_seconds(name: str, seconds: object) -> None:
    """Raise InputError for a time limit that is none; found later, ranks would have started for nothing."""
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 < seconds < math.inf
    ):
        raise InputError(f"{name}={seconds!r}: give a finite number of seconds above 0")
