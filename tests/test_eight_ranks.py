"""Eight ranks on this machine: more than the suite's session has, and more than most machines have cores."""

import pytest

from epmoe.core.cases import Case
from epmoe.core.launch import RankPool
from epmoe.core.shape import MoEShape
from epmoe.core.verify import report, run_case

SHAPE = MoEShape(hidden=16, intermediate=8, experts=20, topk=4)
TOKENS = ((3, 0, 1, 2, 0, 4, 1, 5), (0, 0, 0, 0, 0, 0, 0, 1))


@pytest.fixture(scope="module")
def eight():
    with RankPool(8, "cpu") as ranks:
        yield ranks


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["00_reference", "01_variable_a2a", "02_fixed_capacity"])
def test_values_on_every_rank(eight, name):
    reports = eight.run(
        run_case, Case(stage=name, shape=SHAPE, tokens=TOKENS, kind="zipf"), timeout=120.0
    )
    assert len(reports) == 8
    assert all(one.right for one in reports), report(reports)
