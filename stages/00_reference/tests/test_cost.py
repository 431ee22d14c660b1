"""What the all-gather layer costs, exactly: every token to every rank, float32 sums back."""

from pathlib import Path

import pytest
import torch

from epmoe.core.cases import Case
from epmoe.core.shape import MoEShape

STAGE = Path(__file__).parents[1].name
SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_wire_bytes_depend_on_the_fullest_rank_alone(stage, check, ranks, dtype):
    """Everybody pads to the most tokens of any rank, at least one."""
    tokens = ((3, 0, 5, 1)[:ranks], (0, 0, 0, 0)[:ranks])
    H, K = SHAPE.hidden, SHAPE.topk
    row = (
        H * dtype.itemsize + K * 4 + K * 4 + H * 4
    )  # x, ids, routing weights; the sum that comes home
    for one in check(Case(stage=stage, shape=SHAPE, tokens=tokens, dtype=dtype, capacity=6)):
        for call, brought in zip(one.calls, tokens, strict=True):
            assert call.ledger["wire_bytes"] == (ranks - 1) * max(1, *brought) * row


def test_collectives_and_host_syncs(stage, check):
    for one in check(Case(stage=stage, shape=SHAPE, tokens=((3, 1), (0, 2)))):
        for call in one.calls:
            assert call.ledger["collectives"] == ["all_gather"] * 3 + ["reduce_scatter"]
            assert call.ledger["host_syncs"] == 1  # how long each expert's block is
            assert call.ledger["rows_computed"] == call.rows_needed


def test_room_that_nobody_uses_is_not_sent(stage, check):
    """C = 32, two tokens at the most: the same bytes whether the caller says so or the ranks ask each other."""

    def sent(capacity: int, declared: bool) -> int:
        case = Case(
            stage=stage, shape=SHAPE, tokens=((2, 1),), capacity=capacity, declared=declared
        )
        return check(case)[0].calls[0].ledger["wire_bytes"]

    assert sent(32, declared=False) == sent(32, declared=True) == sent(2, declared=False)
