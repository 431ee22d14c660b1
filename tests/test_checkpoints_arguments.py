"""What epmoe.core.checkpoints is asked for and cannot give: refused with the argument's value."""

from pathlib import Path
from typing import Any

import pytest
import torch

from epmoe.core.checkpoints import hidden_states, load_layer
from epmoe.core.errors import InputError

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny-glm-moe"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.int8}, "dtype=torch.int8: .* float64, float32"),
        ({"dtype": torch.float8_e4m3fn}, "dtype=torch.float8_e4m3fn"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
        ({"experts": [0.9]}, "expert 0.9 does not exist"),
        ({"experts": [0, True]}, "expert True does not exist"),
        ({"experts": "01"}, "expert '0' does not exist"),
        ({"experts": 1}, "experts=1: give a sequence"),
        ({"layer": 1.0}, "layer 1.0 .* is no MoE layer"),
        ({"layer": True}, "layer True .* is no MoE layer"),
    ],
)
def test_arguments_that_are_none_are_named(arguments: dict[str, Any], message):
    with pytest.raises(InputError, match=message):
        load_layer(**{"path": TINY, "layer": 1, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 1.5}, "max_tokens=1.5: give a whole number"),
        ({"max_tokens": True}, "max_tokens=True: give a whole number"),
        ({"text": None}, "text is a NoneType"),
        ({"text": ["abc", "de"]}, "text is a list"),
    ],
)
def test_readings_that_are_none_are_named(arguments: dict[str, Any], message):
    with pytest.raises(InputError, match=message):
        hidden_states(**{"path": TINY, "layer": 1, "text": "abc", **arguments})
