"""Every pair of registered parts that is no stage of its own, with a compact part of the suite.

The whole suite for one of them: pytest --pyargs epmoe.core.conformance --stage fixed_capacity+triton
"""

import pytest

from epmoe.core import registry
from epmoe.core.cases import Case
from epmoe.core.conformance import program
from epmoe.core.conformance.test_contract import (
    test_7D_capture_refused_in_words,
    test_capturable_stages_never_wait,
    test_ledger_is_exact,
    test_parts_keep_their_promises,
)
from epmoe.core.conformance.test_placements import test_hot_expert_is_served_by_turns
from epmoe.core.conformance.test_values import (
    test_1A_idle_rank,
    test_2D_duplicate_ids,
    test_9D_two_rounds,
)
from epmoe.core.shape import MoEShape

STAGE = "pairs"
SMALL = MoEShape(hidden=16, intermediate=24, experts=8, topk=3)

__all__ = [
    "test_1A_idle_rank",
    "test_2D_duplicate_ids",
    "test_7D_capture_refused_in_words",
    "test_9D_two_rounds",
    "test_capturable_stages_never_wait",
    "test_hot_expert_is_served_by_turns",
    "test_ledger_is_exact",
    "test_parts_keep_their_promises",
]


def test_same_bits(stage, run, capabilities):
    """Again, on a fresh layer, and whoever shares the batch: what the two parts declare, the pair holds."""
    assert capabilities.deterministic
    for found in run(program.repeats, Case(stage=stage, shape=SMALL, tokens=((4, 3),)), 1):
        assert found["repeated"], found
        assert found["rebuilt"], found


def test_batch_invariance_can_be_asked_for(stage, run, capabilities):
    """Pinned tiles make a pair batch invariant where its exchange is."""
    grants = registry.load(stage).grants
    if "batch_invariant" not in grants:
        pytest.skip("not offered: no options of the two parts make them batch invariant")
    case = Case(stage=stage, shape=SMALL, tokens=((4, 3),), options=grants["batch_invariant"])
    for found in run(program.repeats, case, 0):
        assert found["permuted"], found
        assert found["halved"], found


def test_routing_from_logits(stage, run):
    """Also where one part has a router of its own and the other knows nothing of it."""
    for rows in run(program.from_logits, Case(stage=stage, shape=SMALL, tokens=((3, 0),))):
        assert all(row is None or row.right for row in rows), rows
