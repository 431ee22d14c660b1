"""Names of stages, and what `build` and a call refuse; choosing among stages is in test_choosing.py."""

import pytest
import torch

from epmoe.core import groups, registry
from epmoe.core.errors import InputError
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.shape import MoEShape
from epmoe.core.weights import random_weights

SHAPE = MoEShape(hidden=16, intermediate=8, experts=4, topk=2)


@pytest.mark.parametrize("name", ["01_variable_a2a", "variable_a2a", "01"])
def test_names_and_aliases(name):
    assert registry.resolve(name) == "01_variable_a2a"


def test_an_unknown_stage_lists_the_known():
    with pytest.raises(InputError, match=r"no stage called '77'.*00_reference"):
        registry.resolve("77")


def test_stages_come_in_ladder_order():
    numbered = [name for name in registry.names() if name[:1].isdigit()]
    assert numbered == sorted(numbered)
    assert numbered[:2] == ["00_reference", "01_variable_a2a"]


def _build(**changes):
    arguments = {
        "stage": "01",
        "shape": SHAPE,
        "weights": random_weights(SHAPE, range(4)),
        "placement": contiguous(4, 1),
        "group": groups.single(),
        "max_tokens_per_rank": 4,
    }
    return build(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "nobody"}, "no stage called 'nobody'"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0"),
        ({"placement": contiguous(4, 2)}, "on 2 ranks"),
        ({"placement": contiguous(5, 1)}, "5 experts"),
        ({"weights": random_weights(SHAPE, range(3))}, "(3, 16, 8)"),
        ({"colour": "red"}, "no option colour"),
        ({"overflow": "drop"}, "overflow='drop'"),
        ({"weights": random_weights(SHAPE, range(4), torch.float64)}, "float64 is not among"),
    ],
)
def test_wrong_builds_are_named(changes, message):
    with pytest.raises(InputError) as caught:
        _build(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["00", "01"])
def test_unchecked_calls_are_checked_without_communication(name):
    """Every local mistake raises at once, checked mode or not; E sentinels are refused in checked mode alone."""
    layer = _build(stage=name, check=False)
    x_TH, gates_TK = torch.zeros(2, 16), torch.ones(2, 2)
    ids_TK = torch.zeros(2, 2, dtype=torch.int32)
    for wrong in (
        (x_TH[:, :8], ids_TK, gates_TK),
        (x_TH[0], ids_TK, gates_TK),
        (x_TH, ids_TK[:, :1], gates_TK),
        (x_TH, ids_TK.float(), gates_TK),
        (x_TH, ids_TK, gates_TK.half()),
        (x_TH.double(), ids_TK, gates_TK),
        (torch.zeros(5, 16), ids_TK[:1].repeat(5, 1), gates_TK[:1].repeat(5, 1)),
    ):
        with pytest.raises(InputError):
            layer(*wrong)
    assert layer(x_TH, ids_TK + 4, gates_TK).tolist() == [[0.0] * 16] * 2
    with pytest.raises(InputError, match="expert id 4: ids are 0 to 3"):
        _build(stage=name, check=True)(x_TH, ids_TK + 4, gates_TK)
