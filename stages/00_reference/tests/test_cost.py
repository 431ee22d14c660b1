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
def test_wire_bytes_depend_on_capacity_alone(stage, check, ranks, dtype):
    tokens = ((3, 0, 5, 1)[:ranks], (0, 0, 0, 0)[:ranks])
    C, H, K = 6, SHAPE.hidden, SHAPE.topk
    out = C * (H * dtype.itemsize + K * 4 + K * 4)  # x, ids, routing weights
    home = C * H * 4
    for one in check(Case(stage=stage, shape=SHAPE, tokens=tokens, dtype=dtype, capacity=C)):
        for call in one.calls:
            assert call.ledger["wire_bytes"] == (ranks - 1) * (out + home)


def test_collectives_and_host_syncs(stage, check):
    for one in check(Case(stage=stage, shape=SHAPE, tokens=((3, 1), (0, 2)))):
        for call in one.calls:
            assert call.ledger["collectives"] == ["all_gather"] * 3 + ["reduce_scatter"]
            assert call.ledger["host_syncs"] == 1  # how long each expert's block is
            assert call.ledger["rows_computed"] == call.rows_needed


def test_declaring_fewer_tokens_shrinks_what_is_sent(stage, check):
    def sent(declared: bool) -> int:
        case = Case(stage=stage, shape=SHAPE, tokens=((2, 1),), capacity=32, declared=declared)
        return check(case)[0].calls[0].ledger["wire_bytes"]

    assert sent(declared=False) == 16 * sent(declared=True)
