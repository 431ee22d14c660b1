"""What must be equal on all ranks, checked before any data moves.

A rank that raises alone leaves its peers waiting in a collective for ever. So every rank brings two things to one
exchange on the control plane: its own problem, if it has one, and a fingerprint of what must agree. Then all ranks
raise the same error, or none does.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from epmoe.core.errors import DisagreementError, InputError
from epmoe.core.groups import EPGroup

T = TypeVar("T")


def agree(group: EPGroup, fingerprint: Mapping[str, object], problem: InputError | None) -> None:
    """Raise the same error on every rank, or on none. Collective.

    Args:
        group: the expert-parallel group.
        fingerprint: name -> value of everything that must be equal.
        problem: what this rank found wrong with its own input.

    Raises:
        InputError: the problem of the first rank that has one (same class, message opens with the rank).
        DisagreementError: a fingerprint differs; names the entry and every rank's value.
    """
    everyone = group.all_gather_objects((problem, dict(fingerprint)))
    for rank, (theirs, _) in enumerate(everyone):
        if theirs is not None:
            raise type(theirs)(f"rank {rank}: {theirs}") from problem
    _compare([prints for _, prints in everyone])


def together(group: EPGroup, make: Callable[[], T]) -> T:
    """What `make` returns on this rank; what it refuses on any rank is raised on all of them. Collective."""
    made, problem = [], None
    try:
        made.append(make())
    except InputError as error:
        problem = error
    agree(group, {}, problem)
    return made[0]


def _compare(prints: list[dict[str, object]]) -> None:
    for name, value in prints[0].items():
        if any(other.get(name) != value for other in prints):
            values = ", ".join(f"rank {rank} has {p.get(name)}" for rank, p in enumerate(prints))
            raise DisagreementError(f"{name} must be the same on all ranks: {values}")
