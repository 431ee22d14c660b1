"""The toy routing on real ranks: what arrives, what leaves and what comes home, as the stage's page says."""

import pytest
import torch

from epmoe.core.figures.route import parcels, row_bytes, rows_sent
from epmoe.core.toy import TOY, ToyCall, call_toy


@pytest.fixture(scope="module")
def calls(pool) -> list[ToyCall]:
    return pool.run(call_toy, "fixed_capacity", ranks=TOY.ranks)


def test_every_token_arrives_everywhere_with_the_slots_there(calls):
    assert calls[0].received() == [(0, (0, 1)), (1, (1, -1)), (2, (-1, -1)), (3, (0, -1))]
    assert calls[1].received() == [(0, (-1, -1)), (1, (-1, 0)), (2, (0, 1)), (3, (-1, 1))]


def test_the_picture_shows_what_arrives(calls):
    for call, drawn in zip(calls, parcels(TOY, "fixed_capacity"), strict=True):
        owned = TOY.placement.experts_of(call.rank)
        arrived = [(t, tuple(owned[s] for s in slots if s >= 0)) for t, slots in call.received()]
        assert arrived == [(p.token, p.experts) for p in drawn]


def test_two_exchanges_and_their_bytes(calls):
    out, home = row_bytes(TOY, "fixed_capacity")
    for call in calls:
        leave = rows_sent(TOY, "fixed_capacity")[call.rank][1 - call.rank]
        assert call.collectives == [("all_to_all", leave * out), ("all_to_all", leave * home)]


def test_the_host_never_waits(calls):
    assert [call.ledger["host_syncs"] for call in calls] == [0, 0]


def test_results_are_the_oracles(calls):
    for call in calls:
        torch.testing.assert_close(call.y_TH, call.wanted_TH)
