"""What fixed capacity costs, exactly: two exchanges of known size, no wait, whatever the router decided."""

from pathlib import Path

import pytest
import torch

from epmoe.core.cases import Case
from epmoe.core.packed_rows import RowLayout
from epmoe.core.plan import drawn_load, wire_bytes
from epmoe.core.shape import MoEShape
from epmoe.fixed_capacity.experts import BLOCK

STAGE = Path(__file__).parents[1].name
SHAPE = MoEShape(hidden=18, intermediate=24, experts=8, topk=3)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_depend_on_the_fullest_rank_alone(stage, check, ranks, dtype):
    """(EP - 1) * C packed rows leave, (EP - 1) * C float32 rows come back; by hand: 18 values, 28 bytes, padded.

    C is the most tokens of any rank, at least one, at most what the layer was built for.
    """
    tokens = ((3, 0, 5, 1)[:ranks], (0, 0, 0, 0)[:ranks], (6, 2, 0, 6)[:ranks])
    row_bytes = {4: 112, 2: 64}[dtype.itemsize]  # 72 + 28 = 100; 36 + 28 = 64
    assert RowLayout(SHAPE.hidden, SHAPE.topk, dtype).row_bytes == row_bytes
    case = Case(stage=stage, shape=SHAPE, tokens=tokens, dtype=dtype, capacity=6, overflow="raise")
    for one in check(case):
        for call, brought in zip(one.calls, tokens, strict=True):
            C = max(1, *brought)
            assert call.ledger["wire_bytes"] == (ranks - 1) * C * (row_bytes + SHAPE.hidden * 4)
            assert call.ledger["buffer_bytes"] == ranks * C * (row_bytes + SHAPE.hidden * 4)


def test_two_exchanges_and_no_wait(stage, check):
    for one in check(Case(stage=stage, shape=SHAPE, tokens=((3, 1), (0, 2), (0, 0)))):
        for call in one.calls:
            assert call.ledger["collectives"] == ["all_to_all", "all_to_all"]
            assert call.ledger["host_syncs"] == 0


def test_every_round_is_two_exchanges(stage, check):
    """T = 11 and 3 through C = 4: three rounds on both ranks, each of the full size."""
    case = Case(stage=stage, shape=SHAPE, tokens=((11, 3),), capacity=4)
    for one in check(case):
        book = one.calls[0].ledger
        assert book["collectives"] == ["all_to_all"] * 6
        assert book["host_syncs"] == 0
        assert book["wire_bytes"] == 3 * 4 * (112 + SHAPE.hidden * 4)


@pytest.mark.parametrize("kind", ["one_rank", "hot_expert", "masked", "duplicates"])
def test_the_whole_ledger_is_blind_to_the_routing(stage, check, kind):
    """Launches, allocations, bytes and computed rows too: what is captured once serves every routing."""
    tokens = ((5, 2), (8, 8), (0, 3))

    def ledgers(kind: str, seed: int) -> list:
        case = Case(stage=stage, shape=SHAPE, tokens=tokens, kind=kind, seed=seed, capacity=8)
        return [[call.ledger for call in one.calls] for one in check(case)]

    assert ledgers(kind, seed=1) == ledgers("uniform", seed=0)


def test_rows_computed_are_the_bounded_blocks(stage, check):
    """N = EP * C * K assignments, E_local = 4 experts: N // BLOCK + E_local blocks, needed or not."""
    for one in check(Case(stage=stage, shape=SHAPE, tokens=((5, 2),), capacity=8, kind="masked")):
        call = one.calls[0]
        assert call.ledger["rows_computed"] == BLOCK * (2 * 5 * 3 // BLOCK + 4)
        assert call.ledger["rows_computed"] > call.rows_needed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_says_what_the_ledger_counts(stage, check, dtype):
    tokens, C = (5, 2, 0, 7), 7  # the fullest rank's
    case = Case(stage=stage, shape=SHAPE, tokens=(tokens,), dtype=getattr(torch, dtype), capacity=9)
    ids = [case.routing(0, rank)[0] for rank in range(case.ranks)]
    wire = wire_bytes(
        "fixed_capacity", SHAPE, drawn_load(SHAPE, ids, case.placed()), dtype=dtype, capacity=C
    )
    planned = [o + b for o, b in zip(wire.dispatch_bytes, wire.combine_bytes, strict=True)]
    assert [one.calls[0].ledger["wire_bytes"] for one in check(case)] == planned


def test_declaring_fewer_tokens_shrinks_what_is_sent(stage, check):
    """C = 32, two tokens at the most: the same bytes whether the caller says so or the ranks ask each other."""

    def sent(overflow: str, declared: bool) -> int:
        case = Case(
            stage=stage, shape=SHAPE, tokens=((2, 1),), capacity=32, overflow=overflow,
            declared=declared,
        )  # fmt: skip
        return check(case)[0].calls[0].ledger["wire_bytes"]

    asked = {sent(overflow, declared=False) for overflow in ("raise", "rounds")}
    told = {sent(overflow, declared=True) for overflow in ("raise", "rounds")}
    assert asked == told == {2 * (112 + SHAPE.hidden * 4)}
