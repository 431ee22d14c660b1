"""A stage that says how much memory it takes keeps its word; see `epmoe.core.memory`."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from epmoe.core import registry
from epmoe.core.cases import Case
from epmoe.core.conformance.growth_program import left_behind
from epmoe.core.conformance.memory_program import held
from epmoe.core.shape import MoEShape

SMALL = MoEShape(hidden=64, intermediate=32, experts=4, topk=2)
SLACK = 3  # the worst draw takes at least this part of what is said: an estimate that is never near is none


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_memory_is_as_said(stage, run, dtype, ranks):
    """What is kept exactly, what a call takes at most: every token twice to one expert, and evenly."""
    if registry.load(stage).memory is None:
        pytest.skip("does not say how much memory its buffers take")
    holds_what_it_says(run, stage, dtype, ranks)


def holds_what_it_says(run: Callable, stage: str, dtype: torch.dtype, ranks: int) -> None:
    """The check itself; `run` as the fixture of that name."""
    tokens = 16
    even = Case(stage=stage, shape=SMALL, tokens=((tokens,) * ranks,), dtype=dtype)
    worst = replace(even, ids=[[[[0, 0]] * tokens] * ranks])
    taken = []
    for case in (even, worst):
        for said, true in run(held, case):
            assert true.kept == said.kept
            assert true.call <= said.call
            taken.append(true.call / said.call)
    assert max(taken) * SLACK >= 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_of_every_size_leave_nothing_behind(stage, run, ranks):
    """A batch may have any size, and serving meets them all: what is kept for one of them would add up."""
    capacity = 9
    tokens = tuple((t,) * ranks for t in range(1, capacity + 1))
    case = Case(stage=stage, shape=SMALL, tokens=tokens, capacity=capacity, declared=True)
    for left in run(left_behind, case):
        assert left == [0] * capacity
