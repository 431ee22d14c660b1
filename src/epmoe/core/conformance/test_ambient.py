"""What a host program has set for other reasons must not change a layer."""

import pytest

from epmoe.core.cases import Case
from epmoe.core.conformance.ambient_program import under_modes
from epmoe.core.shape import MoEShape

SMALL = MoEShape(hidden=32, intermediate=24, experts=6, topk=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_modes_of_the_caller_change_no_bit(stage, run, ranks):
    """Default dtype, autocast and inference mode, around the call and around the build."""
    case = Case(stage=stage, shape=SMALL, tokens=((3, 2)[:ranks],), capacity=4)
    for same in run(under_modes, case):
        assert all(same.values()), [name for name, right in same.items() if not right]
