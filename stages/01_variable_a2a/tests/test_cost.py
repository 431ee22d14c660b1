"""What the variable all-to-all costs, exactly: one row per assignment that leaves its rank, and a wait."""

from pathlib import Path

import pytest
import torch

from epmoe.core.cases import Case
from epmoe.core.shape import MoEShape

STAGE = Path(__file__).parents[1].name
SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)


def traffic(case: Case, call: int) -> list[list[int]]:
    """rows[source][owner], counted with plain loops."""
    owners = case.placed().owners
    rows = [[0] * case.ranks for _ in range(case.ranks)]
    for source in range(case.ranks):
        for expert in case.routing(call, source)[0].flatten().tolist():
            if 0 <= expert < len(owners):
                rows[source][owners[expert]] += 1
    return rows


@pytest.mark.parametrize("kind", ["uniform", "one_rank", "masked", "duplicates"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_wire_bytes_follow_the_routing(stage, check, ranks, dtype, kind):
    tokens = ((3, 0, 5, 1)[:ranks], (0, 0, 0, 0)[:ranks], (7, 2, 0, 6)[:ranks])
    case = Case(stage=stage, shape=SHAPE, tokens=tokens, dtype=dtype, kind=kind)
    H = SHAPE.hidden
    for one in check(case):
        for call in one.calls:
            rows, r = traffic(case, call.call), one.rank
            sent = sum(rows[r]) - rows[r][r]
            received = sum(source[r] for source in rows) - rows[r][r]
            counts = (ranks - 1) * 8
            out = sent * (H * dtype.itemsize + 4 + 4)  # x, slot, routing weight
            home = received * H * 4
            assert call.ledger["wire_bytes"] == counts + out + home


def test_collectives_and_host_syncs(stage, check):
    """Three exchanges and one wait at the least: counts, rows out, rows home. Today five and three."""
    for one in check(Case(stage=stage, shape=SHAPE, tokens=((3, 1), (0, 2)))):
        for call in one.calls:
            assert call.ledger["collectives"] == ["all_to_all"] * 5
            assert call.ledger["host_syncs"] == 3  # two for the counts, one for the experts' blocks


def test_2A_received_rows_equal_the_histogram(stage, check):
    """2A: rows computed on every rank are those that the global ids name, under skew and with 2304 tokens a rank."""
    case = Case(stage=stage, shape=SHAPE, tokens=((2304,) * 4,), kind="hot_expert", rows=16)
    for one in check(case):
        assert one.calls[0].ledger["rows_computed"] == one.calls[0].rows_needed
    assert sum(one.calls[0].rows_needed for one in check(case)) == 4 * 2304 * SHAPE.topk
