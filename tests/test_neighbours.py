"""Every rung against the one below it: the same call, the same answer up to the rounding of both."""

import pytest
import torch

from epmoe.core import registry
from epmoe.core.cases import Case
from epmoe.core.conformance import program
from epmoe.core.shape import MoEShape
from epmoe.core.verify import tolerance

PAIRS = list(zip(registry.names(), registry.names()[1:], strict=False))
SMALL = MoEShape(hidden=16, intermediate=24, experts=6, topk=3)
LONG = MoEShape(hidden=512, intermediate=256, experts=32, topk=8)


@pytest.mark.parametrize(("below", "above"), PAIRS)
def test_a_rung_answers_as_the_one_below(pool, below, above):
    case = Case(stage=below, shape=SMALL, tokens=((5, 0, 9),), kind="zipf")
    for apart in pool.run(program.neighbours, case, above, ranks=case.ranks, timeout=120.0):
        assert apart <= 2 * tolerance(case.dtype)  # both may be off by one


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [(1, 0), (128, 77), (8192, 8000)], ids=str)
@pytest.mark.parametrize(("below", "above"), PAIRS)
def test_on_cuda(gpu_pool, below, above, tokens):
    case = Case(
        stage=below, shape=LONG, tokens=(tokens,), kind="zipf", dtype=torch.bfloat16, rows=48
    )
    for apart in gpu_pool.run(program.neighbours, case, above, ranks=case.ranks, timeout=120.0):
        assert apart <= 2 * tolerance(case.dtype)  # both may be off by one
