"""The toy routing on real ranks: what arrives, what leaves and what comes home, as the stage's page says."""

import pytest
import torch

from epmoe.core.figures.route import parcels, row_bytes, rows_sent
from epmoe.core.toy import TOY, ToyCall, call_toy

COUNT_BYTES = 8  # of one int64 count for a peer


@pytest.fixture(scope="module")
def calls(pool) -> list[ToyCall]:
    return pool.run(call_toy, "variable_a2a", ranks=TOY.ranks)


def test_one_row_for_each_assignment_at_its_owner(calls):
    assert calls[0].received() == [(0, (0,)), (0, (1,)), (1, (1,)), (3, (0,))]
    assert calls[1].received() == [(1, (0,)), (2, (0,)), (2, (1,)), (3, (1,))]


def test_the_picture_shows_what_arrives(calls):
    for call, drawn in zip(calls, parcels(TOY, "variable_a2a"), strict=True):
        owned = TOY.placement.experts_of(call.rank)
        arrived = [(t, tuple(owned[s] for s in slots)) for t, slots in call.received()]
        assert arrived == [(p.token, p.experts) for p in drawn]


def test_exchanges_and_their_bytes(calls):
    out, home = row_bytes(TOY, "variable_a2a")
    for call in calls:
        leave = rows_sent(TOY, "variable_a2a")[call.rank][1 - call.rank]
        names, (counts, *rows, back) = zip(*call.collectives, strict=True)
        assert set(names) == {"all_to_all"}
        assert counts == COUNT_BYTES
        assert sum(rows) == leave * out
        assert back == leave * home


def test_the_host_waits_for_counts_and_for_blocks(calls):
    assert [call.ledger["host_syncs"] for call in calls] == [3, 3]


def test_results_are_the_oracles(calls):
    for call in calls:
        torch.testing.assert_close(call.y_TH, call.wanted_TH)
