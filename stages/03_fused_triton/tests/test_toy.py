"""The toy routing on real ranks: what arrives, what is launched and what comes home, as the stage's page says."""

import pytest
import torch

from epmoe.core.figures.route import row_bytes, rows_sent
from epmoe.core.toy import TOY, ToyCall, call_toy


@pytest.fixture(scope="module")
def calls(pool) -> list[ToyCall]:
    return pool.run(call_toy, "fused_triton", ranks=TOY.ranks)


def test_the_pack_kernel_sends_what_the_stage_before_sent(calls, pool):
    before = pool.run(call_toy, "fixed_capacity", ranks=TOY.ranks)
    for call, wanted in zip(calls, before, strict=True):
        assert call.received() == wanted.received()
        for name in ("x_RH", "slots_RJ", "weights_RJ"):
            assert torch.equal(getattr(call.rows, name), getattr(wanted.rows, name)), name


def test_every_token_arrives_everywhere_with_the_slots_there(calls):
    assert calls[0].received() == [(0, (0, 1)), (1, (1, -1)), (2, (-1, -1)), (3, (0, -1))]
    assert calls[1].received() == [(0, (-1, -1)), (1, (-1, 0)), (2, (0, 1)), (3, (-1, 1))]


def test_two_exchanges_and_their_bytes(calls):
    out, home = row_bytes(TOY, "fixed_capacity")
    for call in calls:
        leave = rows_sent(TOY, "fixed_capacity")[call.rank][1 - call.rank]
        assert call.collectives == [("all_to_all", leave * out), ("all_to_all", leave * home)]


def test_six_launches_and_no_wait(calls):
    assert [call.ledger["launches"] for call in calls] == [6, 6]
    assert [call.ledger["host_syncs"] for call in calls] == [0, 0]


def test_results_are_the_oracles(calls):
    for call in calls:
        torch.testing.assert_close(call.y_TH, call.wanted_TH)
