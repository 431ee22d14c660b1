"""Every pair of registered parts that is no stage of its own, with a compact part of the suite.

The whole suite for one of them: pytest --pyargs epmoe.core.conformance --stage fixed_capacity+triton
"""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from epmoe.core import ambient, groups, registry
from epmoe.core.bench.subjects import resolve_names
from epmoe.core.cases import Case
from epmoe.core.cli import app
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
from epmoe.core.errors import NotCapturableError
from epmoe.core.shape import MoEShape
from epmoe.core.tune import tuner_of
from epmoe.core.verify import bring, build_case
from epmoe.vllm_plugin.settings import Settings, read

STAGE = "pairs"
LONG = True
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


def test_a_capture_is_refused_from_logits_too(monkeypatch):
    """An exchange that routes by itself, beside experts that wait for the host."""
    group, case = (
        groups.single("cpu"),
        Case(stage="fused_capacity+loop", shape=SMALL, tokens=((2,),)),
    )
    layer, x_TH = build_case(group, case), bring(group, case, 0)[0]
    monkeypatch.setattr(ambient, "capturing", lambda device: True)
    with pytest.raises(NotCapturableError, match=r"fused_capacity\+loop waits for the host"):
        layer.from_logits(x_TH, torch.randn(2, SMALL.experts))
    monkeypatch.undo()
    assert layer.from_logits(x_TH, torch.randn(2, SMALL.experts)).shape == x_TH.shape


def test_sizes_that_follow_the_routing_leave_nothing_behind():
    """The list of tiles lies in one buffer whatever the size of a call; tiles are looked up for few sizes."""
    group = groups.single("cpu")
    case = Case(stage="variable_a2a+triton", shape=SMALL, tokens=tuple((t,) for t in range(9)))
    layer: Any = build_case(group, case)
    kept = layer.workspace.nbytes
    for call in range(9):
        layer(*bring(group, case, call))
    assert layer.workspace.nbytes == kept
    assert set(layer.experts.tuning._found) == {1, 2, 4, 8}


# ---- wherever a stage is named


def test_a_pair_goes_wherever_a_stage_is_named():
    assert read({"EPMOE_STAGE": "fixed_capacity+triton"}) == Settings(stage="fixed_capacity+triton")
    assert resolve_names(["fixed_capacity+loop"], 1) == ["fixed_capacity+loop"]
    assert resolve_names(["fixed_capacity+triton:-gather"], 1) == ["fixed_capacity+triton:-gather"]
    assert tuner_of("fixed_capacity+triton") is tuner_of("03")


def test_a_pair_goes_through_the_command_line(tmp_path):
    out = tmp_path / "found.json"
    words = ["check", "variable_a2a+grouped", "--ranks", "1", "--tokens", "3", "--draw", "masked"]
    done = CliRunner().invoke(app, [*words, "--seeds", "1", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["right"]
    refused = CliRunner().invoke(app, ["check", "all_gather+nobody"])
    assert "no experts called 'nobody'" in str(refused.exception) + refused.output
