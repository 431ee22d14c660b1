"""The toy routing as data: the numbers that docstrings, pages and pictures work through."""

import pytest
import torch

from epmoe.core.plan import drawn_load
from epmoe.core.toy import TOY


def test_who_names_whom():
    assert TOY.ranks == 2
    assert TOY.capacity == 2
    assert [TOY.ids_TK(rank).tolist() for rank in range(2)] == [[[0, 1], [1, 2]], [[2, 3], [0, 3]]]
    assert [TOY.named_by(token) for token in range(4)] == [(0, 1), (1, 2), (2, 3), (0, 3)]
    assert [list(TOY.tokens_of(rank)) for rank in range(2)] == [[0, 1], [2, 3]]


def test_who_owns_whom():
    assert [TOY.placement.experts_of(rank) for rank in range(2)] == [(0, 1), (2, 3)]
    assert TOY.placement.slots == (0, 1, 0, 1)


def test_it_fits_its_shape():
    shape = TOY.shape
    assert (shape.hidden, shape.intermediate, shape.experts, shape.topk) == (4, 2, 4, 2)
    assert TOY.gates_TK(0).tolist() == [[0.75, 0.25]] * 2
    assert TOY.ids_TK(0).dtype == torch.int32


def test_a_row_shows_which_token_it_is():
    torch.testing.assert_close(TOY.x_TH(1)[1], torch.tensor([3.0, 3.1, 3.2, 3.3]))


def test_a_rank_has_its_part_of_all_weights():
    everything = TOY.weights()
    torch.testing.assert_close(TOY.weights(1).w2_EHI, everything.w2_EHI[2:], rtol=0, atol=0)


def test_what_the_routing_asks():
    """As worked in the docstring of `plan.load`."""
    load = drawn_load(TOY.shape, [TOY.ids_TK(0), TOY.ids_TK(1)], TOY.placement)
    assert load.assignments == (4, 4)
    assert load.active == (2, 2)
    assert load.hits_SD == ((2, 1), (1, 2))


@pytest.mark.parametrize("kernels", ["epmoe.fused_triton.kernels"])
def test_kernel_docstrings_work_the_same_routing(kernels):
    module = pytest.importorskip(kernels, reason="Triton is not here: pip install triton")
    for rank in range(2):
        said = ", ".join(f"token {t} names {TOY.named_by(t)}" for t in TOY.tokens_of(rank))
        assert f"rank {rank}: {said}" in module.__doc__
