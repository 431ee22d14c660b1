"""Stages for tests of the choice between them: they declare something, and cannot be built."""

from epmoe.core.capabilities import Capabilities
from epmoe.core.registry import Stage


def stage(*, memory=None, grants=None, options=(), **can) -> Stage:
    def never(spec):
        raise AssertionError("choosing builds nothing")

    return Stage(
        summary="",
        capabilities=Capabilities(**can),
        factory=never,
        options=dict.fromkeys(options, "what it does"),
        memory=memory,
        grants=grants or {},
    )
