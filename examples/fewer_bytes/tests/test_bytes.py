"""What the two ideas promise, counted: bytes that leave a rank, against plain loops over the routing."""

import pytest
import torch

from epmoe.core.cases import Case
from epmoe.core.conformance.plugin import judged
from epmoe.core.shape import MoEShape
from epmoe.core.verify import run_case

SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=4)
TOKENS = ((5, 0, 9), (3, 4, 0))


def rows_between(case: Case, call: int) -> list[list[int]]:
    """rows[source][owner]: how many tokens of `source` name at least one expert of `owner`."""
    owners = case.placed().owners
    rows = [[0] * case.ranks for _ in range(case.ranks)]
    for source in range(case.ranks):
        for named in case.routing(call, source)[0].tolist():
            for owner in {owners[e] for e in named if e >= 0}:
                rows[source][owner] += 1
    return rows


@pytest.mark.parametrize("kind", ["uniform", "masked", "duplicates"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_travels_once_to_a_rank(pool, kind, dtype):
    case = Case(stage="once_per_rank+padded", shape=SHAPE, tokens=TOKENS, kind=kind, dtype=dtype)
    for one in judged(pool.run(run_case, case, ranks=case.ranks)):
        for call in one.calls:
            rows, r = rows_between(case, call.call), one.rank
            sent = sum(rows[r]) - rows[r][r]
            received = sum(source[r] for source in rows) - rows[r][r]
            counts = (case.ranks - 1) * 8
            out = sent * (SHAPE.hidden * dtype.itemsize + SHAPE.topk * (4 + 4))
            assert call.ledger["wire_bytes"] == counts + out + received * SHAPE.hidden * 4


def sent(pool, stage: str, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that leave two ranks in one call."""
    case = Case(stage=stage, shape=SHAPE, tokens=((tokens, tokens),), dtype=dtype)
    reports = judged(pool.run(run_case, case, ranks=2))
    return sum(one.calls[0].ledger["wire_bytes"] for one in reports)


def test_it_sends_less_than_a_row_for_every_expert(pool):
    rows = sent(pool, "variable_a2a+padded", 16, torch.float32)
    assert sent(pool, "once_per_rank+padded", 16, torch.float32) < rows / 1.5


def test_break_even_of_travelling_weights(pool):
    """E * I / K tokens of every rank in 16 bits; a row carries a slot and a weight too, which that leaves out."""
    tokens = SHAPE.experts * SHAPE.intermediate // SHAPE.topk
    rows = sent(pool, "variable_a2a+padded", tokens, torch.bfloat16)
    weights = sent(pool, "travelling_weights", tokens, torch.bfloat16)
    assert 0.9 < rows / weights < 1.2


@pytest.mark.parametrize("kind", ["uniform", "one_rank"])
def test_weights_travel_whatever_the_routing(pool, kind):
    """Eight experts on three ranks: all send three, the last rank one that is padding."""
    case = Case(stage="travelling_weights", shape=SHAPE, tokens=TOKENS, kind=kind)
    for one in judged(pool.run(run_case, case, ranks=case.ranks)):
        for call in one.calls:
            assert call.ledger["collectives"] == ["all_gather"] * 2
            expert = 3 * SHAPE.hidden * SHAPE.intermediate * 4
            assert call.ledger["wire_bytes"] == (case.ranks - 1) * 3 * expert
