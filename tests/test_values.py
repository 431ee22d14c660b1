"""Plain values that callers hand in: what is a whole number, and what a dtype is called."""

import pytest
import torch

from epmoe.core.errors import InputError
from epmoe.core.values import check_whole, dtype_name, named_dtype


@pytest.mark.parametrize(
    ("value", "least", "most"), [(0, 0, None), (5, 5, 5), (2**300, 1, None), (-1, -1, 0)]
)
def test_whole_numbers_within_their_limits_pass(value, least, most):
    check_whole("tokens", value, least, most)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, torch.tensor(1), 0])
def test_everything_else_is_refused_with_the_value_and_the_limit(value):
    with pytest.raises(InputError, match="give a whole number of at least 1") as refused:
        check_whole("tokens", value, 1)
    assert str(refused.value).startswith(f"tokens={value!r}: ")


def test_both_limits_are_named():
    with pytest.raises(InputError, match=r"tokens=9: give a whole number from 1 to 8"):
        check_whole("tokens", 9, 1, 8)


@pytest.mark.parametrize("value", ["x" * 100_000, -(10**5000)], ids=["text", "digits"])
def test_an_endless_value_gives_a_short_message(value):
    with pytest.raises(InputError) as refused:
        check_whole("tokens", value, 1)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_of_layers_has_a_name_and_back(dtype):
    assert named_dtype(dtype_name(dtype), "cpu") == dtype


@pytest.mark.parametrize("name", ["float8", "float64", "int8", ""])
def test_other_dtypes_are_refused_with_the_list(name):
    with pytest.raises(InputError, match="choose auto, float32, bfloat16, float16"):
        named_dtype(name, "cpu")
