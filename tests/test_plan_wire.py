"""Bytes on the wire against numbers worked by hand."""

import math

import pytest
import torch
from tests.plan_examples import SLOW, TOY, TOY_DRAW

from epmoe.core.launch import launch
from epmoe.core.layer import build
from epmoe.core.ledger import record
from epmoe.core.placement import contiguous
from epmoe.core.plan import drawn_load, expected_load, plan, wire_bytes
from epmoe.core.shape import named_shape
from epmoe.core.weights import random_weights

GLM = named_shape("glm-5.3-flash")


@pytest.mark.parametrize(
    ("scheme", "row", "rows_out", "rows_back"),
    [
        # H 4 in bfloat16 is 8 bytes; two ids and two weights are 16; the flag makes 28, padded to 32
        ("all_gather", 24, (2, 2), (2, 2)),
        ("variable", 16, (1, 1), (1, 1)),
        ("dedup", 24, (1, 1), (1, 1)),
        ("fixed_capacity", 32, (3, 3), (3, 3)),
    ],
)
def test_toy_wire_by_hand(scheme, row, rows_out, rows_back):
    wire = wire_bytes(scheme, TOY, drawn_load(TOY, TOY_DRAW), capacity=3)
    assert (wire.dispatch_row_bytes, wire.combine_row_bytes) == (row, 16)
    assert wire.dispatch_bytes == tuple(rows * row for rows in rows_out)
    assert wire.combine_bytes == tuple(rows * 16 for rows in rows_back)
    assert (wire.rows_sent, wire.rows_needed) == (sum(rows_out), 2)
    assert wire.rows_per_needed == sum(rows_out) / 2
    assert wire.seconds(10.0) == pytest.approx(max(rows_out) * (row + 16) / 10)


def test_all_tokens_to_one_rank_show_in_its_return_traffic():
    ids_TK = torch.tensor([[0, 1]] * 5)
    load = drawn_load(TOY, [ids_TK[:2], ids_TK[:3]])
    wire = wire_bytes("variable", TOY, load)
    assert wire.dispatch_bytes == (0, 6 * 16)
    assert wire.combine_bytes == (6 * 16, 0)
    assert wire_bytes("dedup", TOY, load).dispatch_bytes == (0, 3 * 24)
    assert wire_bytes("all_gather", TOY, load).dispatch_bytes == (3 * 24, 3 * 24)


def test_what_sending_only_where_needed_saves():
    rows = {}
    for ep in (4, 8):
        wires = plan(GLM, ep, 8).wires
        rows[ep] = {wire.scheme: wire.rows_sent for wire in wires}
    assert 1 - rows[4]["dedup"] / rows[4]["all_gather"] == pytest.approx(0.10, abs=0.005)
    assert 1 - rows[8]["dedup"] / rows[8]["all_gather"] == pytest.approx(0.34, abs=0.005)
    assert rows[4]["variable"] / rows[4]["all_gather"] == pytest.approx(2.0)


def test_one_rank_sends_nothing():
    for wire in plan(TOY, 1, 4, SLOW).wires:
        assert wire.dispatch_bytes == wire.combine_bytes == (0,)
        assert wire.rows_per_needed == 1


def test_rows_for_nobody_are_infinite_overhead():
    load = drawn_load(TOY, [torch.tensor([[0, 1]]), torch.tensor([[2, 3]])])
    assert wire_bytes("fixed_capacity", TOY, load).rows_per_needed == math.inf
    assert wire_bytes("dedup", TOY, load).rows_per_needed == 1


def test_return_rows_in_another_dtype():
    load = expected_load(TOY, 2, 2)
    assert wire_bytes("dedup", TOY, load, combine_dtype="bfloat16").combine_row_bytes == 8
    narrow = wire_bytes("dedup", TOY, load, dtype="float8")
    assert (narrow.dispatch_row_bytes, narrow.combine_row_bytes) == (4 + 16, 16)


# ---- what the stages really send


STAGES = {
    "reference": "all_gather",
    "variable_a2a": "variable",
    "fixed_capacity": "fixed_capacity",
}


def sent_here(group) -> dict[str, int]:
    """Bytes that leave this rank for others in one call of every stage on the toy draw."""
    placement = contiguous(TOY.experts, group.size)
    weights = random_weights(TOY, placement.experts_of(group.rank))
    ids_TK = TOY_DRAW[group.rank]
    sent = {}
    for name in STAGES:
        layer = build(name, TOY, weights, placement, group, max_tokens_per_rank=2)
        with record() as book:
            layer(torch.ones(len(ids_TK), TOY.hidden), ids_TK, torch.ones(ids_TK.shape))
        layer.close()
        sent[name] = sum(one.wire_bytes for one in book.collectives)
    return sent


@pytest.fixture(scope="module")
def sent_by_ranks() -> list[dict[str, int]]:
    return launch(sent_here, ranks=2, device="cpu")


@pytest.mark.parametrize("name", STAGES)
def test_the_ledger_of_a_stage_agrees(name, sent_by_ranks):
    wire = wire_bytes(STAGES[name], TOY, drawn_load(TOY, TOY_DRAW), dtype="float32")
    counts = 8 if name == "variable_a2a" else 0  # one int64 for the other rank goes ahead
    planned = [
        out + back + counts
        for out, back in zip(wire.dispatch_bytes, wire.combine_bytes, strict=True)
    ]
    assert [sent[name] for sent in sent_by_ranks] == planned
