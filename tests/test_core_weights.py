"""Weights, shapes and draws: the inputs that everything else is tested with."""

import pytest
import torch

from epmoe.core.draws import KINDS, draw
from epmoe.core.errors import InputError
from epmoe.core.placement import contiguous
from epmoe.core.shape import SHAPES, MoEShape, named_shape
from epmoe.core.weights import ExpertWeights, random_weights

SHAPE = MoEShape(hidden=6, intermediate=4, experts=8, topk=2)


def test_any_rank_draws_the_same_expert():
    everything = random_weights(SHAPE, range(8), seed=3)
    some = random_weights(SHAPE, [5, 2], seed=3)
    assert torch.equal(some.w13_E2IH, everything.w13_E2IH[[5, 2]])
    assert torch.equal(some.w2_EHI, everything.w2_EHI[[5, 2]])


def test_down_projection_grows_with_the_expert():
    distinct, alike = (random_weights(SHAPE, range(8), distinct=d) for d in (True, False))
    factor_E = (distinct.w2_EHI / alike.w2_EHI).mean(dim=(1, 2))
    assert factor_E.tolist() == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8], rel=1e-5)
    assert torch.equal(distinct.w13_E2IH, alike.w13_E2IH)


def test_no_experts_have_shapes_all_the_same():
    nobody = random_weights(SHAPE, [], torch.bfloat16)
    assert (nobody.experts, nobody.hidden, nobody.intermediate) == (0, 6, 4)
    assert nobody.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("w13", "w2", "message"),
    [
        (torch.zeros(2, 8, 6), torch.zeros(6, 4), "expected"),
        (torch.zeros(2, 8, 6), torch.zeros(2, 6, 5), r"\(2, 10, 6\)"),
        (torch.zeros(3, 8, 6), torch.zeros(2, 6, 4), r"\(2, 8, 6\)"),
        (torch.zeros(2, 8, 6), torch.zeros(2, 6, 4, dtype=torch.float16), "must be alike"),
    ],
)
def test_weights_that_do_not_fit_are_named(w13, w2, message):
    with pytest.raises(InputError, match=message):
        ExpertWeights(w13, w2)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_repeat_and_keep_their_promise(kind):
    placement = contiguous(8, 4)
    ids_TK, weights_TK = draw(kind, 64, 2, placement, seed=5)
    again_TK, _ = draw(kind, 64, 2, placement, seed=5)
    other_TK, _ = draw(kind, 64, 2, placement, seed=6)
    assert torch.equal(ids_TK, again_TK)
    assert not torch.equal(ids_TK, other_TK)
    assert weights_TK.sum(dim=1).tolist() == pytest.approx([1.0] * 64, rel=1e-6)
    rows = ids_TK.tolist()
    assert all(-1 <= e < 8 for row in rows for e in row)
    twice = sum(a == b != -1 for a, b in rows)
    assert twice == (64 if kind == "duplicates" else 0)
    assert any(-1 in row for row in rows) == (kind == "masked")
    counts = [sum(row.count(e) for row in rows) for e in range(8)]
    if kind == "one_rank":
        assert counts == [0] * 6 + [64, 64]
    if kind == "hot_expert":
        assert max(counts) == 64
    if kind == "zipf":
        assert max(counts) >= 2.5 * min(counts)


def test_an_unknown_draw_lists_the_known():
    with pytest.raises(InputError, match=r"gaussian.*uniform"):
        draw("gaussian", 1, 1, contiguous(2, 1), seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 0}, "topk=0"),
        ({"topk": 9}, "topk=9 is more than experts=8"),
        ({"hidden": 0}, "hidden=0"),
        ({"hidden": 2.5}, "hidden=2.5"),
        ({"shared_intermediate": -1}, "shared_intermediate=-1"),
        ({"shared_intermediate": 1.5}, "shared_intermediate=1.5"),
        ({"shared_intermediate": None}, "shared_intermediate=None"),
        ({"hidden": True}, "hidden=True"),
        ({"layers": 2.0}, "layers=2.0"),
    ],
)
def test_5B_bad_shapes_are_named(change, message):
    """5B: K = 0 and K > E among them."""
    with pytest.raises(InputError, match=message):
        SHAPE.with_(**change)


def test_named_shapes():
    assert all(name == shape.name for name, shape in SHAPES.items())
    assert named_shape("deepseek-v3").expert_parameters() == 3 * 7168 * 2048
    with pytest.raises(InputError, match=r"gpt.*toy"):
        named_shape("gpt")
