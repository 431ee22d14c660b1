"""The oracle itself, against answers that were worked out by hand."""

import pytest
import torch

from epmoe.core.weights import ExpertWeights
from epmoe.reference.oracle import expert_output, oracle

SILU_OF_2 = 2 / (1 + 2.718281828459045**-2)


def by_hand(experts: int) -> ExpertWeights:
    """H = 2, I = 1: gate reads x[0], up reads x[1], expert e answers (e + 1, 10 * (e + 1)) times their product."""
    w13_E2IH = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).repeat(experts, 1, 1)
    loud_E = torch.arange(1.0, experts + 1)
    w2_EHI = torch.stack([loud_E, 10 * loud_E], dim=1)[:, :, None]
    return ExpertWeights(w13_E2IH, w2_EHI)


def test_gate_comes_first_then_up():
    f_H = expert_output(torch.tensor([2.0, 3.0], dtype=torch.float64), by_hand(1), 0)
    assert f_H.tolist() == pytest.approx([3 * SILU_OF_2, 30 * SILU_OF_2], rel=1e-12)


def test_weights_and_experts_are_added():
    x_TH = torch.tensor([[2.0, 3.0], [2.0, -3.0]])
    ids_TK = torch.tensor([[0, 2], [1, 1]], dtype=torch.int32)
    gates_TK = torch.tensor([[0.5, 0.25], [0.25, 0.5]])
    answer = oracle(x_TH, ids_TK, gates_TK, by_hand(3), torch.float64)
    # token 0: 0.5 * 1 + 0.25 * 3; token 1 names expert 1 twice: 0.75 * 2, with the sign of its up projection
    factor_T = [1.25 * 3 * SILU_OF_2, -1.5 * 3 * SILU_OF_2]
    assert answer.y_TH[:, 0].tolist() == pytest.approx(factor_T, rel=1e-12)
    assert answer.y_TH[:, 1].tolist() == pytest.approx([10 * f for f in factor_T], rel=1e-12)


def test_terms_do_not_cancel():
    """Two experts that cancel leave nothing of the sum, and all of the terms."""
    x_TH, ids_TK = torch.tensor([[2.0, 3.0]]), torch.tensor([[0, 1]])
    answer = oracle(x_TH, ids_TK, torch.tensor([[1.0, -0.5]]), by_hand(2), torch.float64)
    assert answer.y_TH.abs().max() < 1e-12
    assert answer.terms_T.tolist() == pytest.approx([2 * 30 * SILU_OF_2], rel=1e-12)


@pytest.mark.parametrize("nothing", [-1, 3, 8])
def test_3A_ids_outside_are_nothing(nothing):
    """3A: -1, E and beyond contribute zero."""
    x_TH, ids_TK = torch.tensor([[2.0, 3.0]]), torch.tensor([[nothing, nothing]])
    answer = oracle(x_TH, ids_TK, torch.tensor([[0.5, 0.5]]), by_hand(3))
    assert answer.y_TH.tolist() == [[0.0, 0.0]]
    assert answer.terms_T.tolist() == [0.0]


def test_no_tokens():
    answer = oracle(torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0, 2), by_hand(3))
    assert answer.y_TH.shape == (0, 2)
    assert answer.y_TH.dtype == torch.float32
