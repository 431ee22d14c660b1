"""A layer belongs to its process: it is not pickled; on a single group it can be copied."""

import pickle
from copy import deepcopy
from typing import Any

import cloudpickle
import pytest
import torch

from epmoe.core import groups
from epmoe.core.errors import InputError
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.shape import MoEShape
from epmoe.core.weights import random_weights

SHAPE = MoEShape(hidden=16, intermediate=8, experts=4, topk=2)
CALL = (torch.randn(2, 16), torch.tensor([[0, 1], [3, 2]]).int(), torch.ones(2, 2))


def layer_of(stage: str) -> Any:
    return build(
        stage, SHAPE, random_weights(SHAPE, range(4)), contiguous(4, 1), groups.single(), 8
    )


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_a_layer_is_not_pickled(dumps):
    layer = layer_of("02")
    with pytest.raises(InputError, match="holds a group of processes and cannot be pickled"):
        dumps({"model": [layer]})


@pytest.mark.parametrize("name", ["01", "02", "fused_capacity+loop"])
def test_a_copy_is_a_layer_of_its_own(name):
    layer = layer_of(name)
    copied, y_TH = deepcopy(layer), layer(*CALL)
    assert torch.equal(copied(*CALL), y_TH)
    copied.spec.weights.w2_EHI.zero_()
    assert torch.equal(layer(*CALL), y_TH)
    layer.close()
    assert not copied.closed
    assert not copied(*CALL).any()
