"""The toy routing on real ranks: what arrives, what leaves and what comes home, as the stage's page says."""

import pytest
import torch

from epmoe.core.figures.route import parcels, row_bytes, rows_sent
from epmoe.core.toy import TOY, ToyCall, call_toy
from epmoe.reference.oracle import expert_output, oracle


@pytest.fixture(scope="module")
def calls(pool) -> list[ToyCall]:
    return pool.run(call_toy, "reference", ranks=TOY.ranks)


def test_every_token_arrives_everywhere(calls):
    assert calls[0].received() == [(0, (0, 1)), (1, (1, -1)), (2, (-1, -1)), (3, (0, -1))]
    assert calls[1].received() == [(0, (-1, -1)), (1, (-1, 0)), (2, (0, 1)), (3, (-1, 1))]


def test_the_picture_shows_what_arrives(calls):
    for call, drawn in zip(calls, parcels(TOY, "reference"), strict=True):
        owned = TOY.placement.experts_of(call.rank)
        arrived = [(t, tuple(owned[s] for s in slots if s >= 0)) for t, slots in call.received()]
        assert arrived == [(p.token, p.experts) for p in drawn]


def test_exchanges_and_their_bytes(calls):
    out, home = row_bytes(TOY, "reference")
    for call in calls:
        leave = rows_sent(TOY, "reference")[call.rank][1 - call.rank]
        names = [name for name, _ in call.collectives]
        assert names == ["all_gather", "all_gather", "all_gather", "reduce_scatter"]
        assert sum(size for _, size in call.collectives[:3]) == leave * out
        assert call.collectives[3][1] == leave * home


def test_results_are_the_oracles(calls):
    for call in calls:
        torch.testing.assert_close(call.y_TH, call.wanted_TH)


def test_the_oracle_by_hand():
    weights, x_H = TOY.weights(), TOY.x_TH(0)[1]
    by_hand_H = 0.75 * expert_output(x_H, weights, 1) + 0.25 * expert_output(x_H, weights, 2)
    answer = oracle(TOY.x_TH(0), TOY.ids_TK(0), TOY.gates_TK(0), weights)
    torch.testing.assert_close(answer.y_TH[1], by_hand_H)
