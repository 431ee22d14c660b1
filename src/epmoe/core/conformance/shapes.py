"""Sizes of layers and numbers of tokens that several checks use."""

from epmoe.core.shape import MoEShape

SMALL = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)
USUAL = MoEShape(hidden=64, intermediate=96, experts=8, topk=2)

# T by rank, three calls, for 4 ranks: none, one and several tokens; a call without any; the fullest rank changes.
_STEPS = ((3, 0, 5, 1), (0, 0, 0, 0), (1, 6, 0, 2))


def steps(ranks: int) -> tuple[tuple[int, ...], ...]:
    """T of every rank in each call, for up to 4 ranks."""
    return tuple(call[:ranks] for call in _STEPS)
