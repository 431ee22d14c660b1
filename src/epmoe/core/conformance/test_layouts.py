"""Weights that are views of other tensors: read right, or refused in words before anything is sent."""

import pytest
import torch

from epmoe.core.cases import Case
from epmoe.core.conformance.layout_program import LAYOUTS, laid_out
from epmoe.core.conformance.shapes import SMALL


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_11B_weights_that_are_not_dense(stage, run, dtype, layout):
    """11B: a stage may have kernels that cannot read them; then all ranks hear of it, and of which strides."""
    results = run(laid_out, Case(stage=stage, shape=SMALL, tokens=((5, 1),), dtype=dtype), layout)
    told = {said for said, _ in results}
    assert len(told) == 1, told
    (said,) = told
    if said:
        assert said.startswith("UnsupportedError"), said
        assert "strides" in said, said
    else:
        assert all(row is None or row.right for _, row in results), results
