"""`build("auto", ...)`: the same layer on every rank, right values, and words that are the same everywhere."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from epmoe.core import groups, measured, own_file
from epmoe.core.capabilities import Wishes
from epmoe.core.cases import Case
from epmoe.core.conformance.program import caught
from epmoe.core.groups import EPGroup
from epmoe.core.layer import build
from epmoe.core.measured import Comparison, Situation
from epmoe.core.placement import contiguous
from epmoe.core.shape import MoEShape
from epmoe.core.verify import report, run_case
from epmoe.core.weights import random_weights

SHAPE = MoEShape(hidden=16, intermediate=8, experts=4, topk=2)
CASE = Case(stage="auto", shape=SHAPE, tokens=((4, 3), (0, 2)))


def times(**microseconds: float) -> Comparison:
    situation = Situation(
        transport="gloo", dtype="float32", hidden=16, intermediate=8, experts=4, topk=2, ranks=2,
        tokens=4,
    )  # fmt: skip
    versions = {"torch": "2"}
    return Comparison(
        device="cpu", situation=situation, microseconds=microseconds, created="now", versions=versions
    )  # fmt: skip


FIRST = times(**{"00_reference": 9.0, "01_variable_a2a": 5.0, "02_fixed_capacity": 7.0})
SECOND = times(**{"00_reference": 1.0, "01_variable_a2a": 5.0, "02_fixed_capacity": 7.0})


def with_files(group: EPGroup, files: list[str], program, *arguments):
    """The program where every rank has a file of measurements of its own."""
    before = os.environ.get(own_file.VARIABLE)
    os.environ[own_file.VARIABLE] = files[group.rank]
    try:
        return program(group, *arguments)
    finally:
        os.environ.pop(own_file.VARIABLE)
        if before is not None:
            os.environ[own_file.VARIABLE] = before


def described(group: EPGroup, stage: str = "auto", **changes: object) -> dict:
    placement = contiguous(SHAPE.experts, group.size)
    weights = random_weights(SHAPE, placement.experts_of(group.rank))
    layer = build(stage, SHAPE, weights, placement, group, 4, **changes)
    try:
        return layer.describe()
    finally:
        layer.close()


def said(group: EPGroup, *stages: str, **changes: object) -> str:
    """What building says; a stage for every rank, or one for all."""
    stage = stages[group.rank % len(stages)]
    return caught(lambda: described(group, stage, **changes))


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Two files that disagree."""
    return [
        str(measured.keep([one], tmp_path / f"{rank}.json"))
        for rank, one in enumerate((FIRST, SECOND))
    ]


@pytest.fixture
def empty(tmp_path) -> list[str]:
    return [str(tmp_path / "none.json")] * 2


def test_in_ladder_order_it_is_the_last_rung_that_compiles_here(pool, empty):
    """03 would be interpreted on a CPU; 02 is the last that is not."""
    reports = pool.run(with_files, empty, run_case, CASE, ranks=2)
    assert all(r.right for r in reports), report(reports)
    for one in pool.run(with_files, empty, described, ranks=2):
        assert (one["stage"], one["chosen_by"]) == ("02_fixed_capacity", "ladder order")


def test_rank_0_s_measurements_count_for_all(pool, files):
    """Rank 1's file says 00; both build rank 0's 01, and it is right."""
    reports = pool.run(with_files, files, run_case, CASE, ranks=2)
    assert all(r.right for r in reports), report(reports)
    for one in pool.run(with_files, files, described, ranks=2):
        assert one["stage"] == "01_variable_a2a"
        assert one["chosen_by"] == "measured: 5.0 us, T=4 on cpu, now (torch 2)"
    for one in pool.run(with_files, files[::-1], described, ranks=2):
        assert one["stage"] == "00_reference"


def test_a_named_stage_says_so(pool):
    for one in pool.run(described, "01", ranks=2):
        assert (one["stage"], one["chosen_by"]) == ("01_variable_a2a", "name")


def test_a_broken_file_counts_on_rank_0_alone(pool, files):
    """On rank 0 the same error on both ranks; on rank 1 nobody reads it."""
    Path(files[1]).write_text("{")
    for one in pool.run(with_files, files, described, ranks=2):
        assert one["stage"] == "01_variable_a2a"
    errors = pool.run(with_files, files[::-1], said, "auto", ranks=2)
    assert len(set(errors)) == 1
    assert errors[0].startswith("InputError: rank 0: ")
    assert "is no tuning file" in errors[0]


def test_ranks_that_ask_for_different_things_are_told(pool, empty):
    """One names a stage and the other does not; nobody hangs."""
    errors = pool.run(with_files, empty, said, "auto", "02", ranks=2)
    assert len(set(errors)) == 1
    assert "stage must be the same on all ranks: rank 0 has auto, rank 1 has 02" in errors[0]


def test_wishes_and_options_decide():
    group = groups.single()
    assert described(group, wishes=Wishes(deterministic=True))["stage"] == "02_fixed_capacity"
    assert described(group, product="blocks")["product"] == "blocks"
    nobody = said(group, "auto", wishes=Wishes(memory=1))
    assert nobody.startswith("UnsupportedError: no stage can serve memory=1 B, dtype=float32")
    for name in ("00_reference", "01_variable_a2a", "02_fixed_capacity", "03_fused_triton"):
        assert f"{name}: " in nobody
    assert "has no option colour" in said(group, "auto", colour="red")


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        (Wishes(graph_capturable=True), "is not graph capturable"),
        (Wishes(batch_invariant=True), "is not batch invariant"),
        (Wishes(memory=1), "over the limit of 1 B"),
    ],
    ids=["graph", "invariant", "memory"],
)
def test_a_named_stage_is_held_to_the_wishes_too(wishes, reason):
    error = said(groups.single(), "01", wishes=wishes)
    assert error.startswith("UnsupportedError: rank 0: 01_variable_a2a cannot serve this layer: ")
    assert reason in error


def test_a_named_stage_tells_the_option_that_would_do():
    error = said(groups.single(), "03", wishes=Wishes(batch_invariant=True))
    assert "would be batch invariant with batch_invariant=True" in error


def test_no_wishes_and_empty_wishes_are_the_same(pool, empty):
    def build_with(group):
        wishes = Wishes() if group.rank else None
        return described(group, "auto", wishes=wishes)["stage"]

    assert pool.run(with_files, empty, build_with, ranks=2) == ["02_fixed_capacity"] * 2


def test_wishes_that_differ_between_ranks_are_told(pool, empty):
    def build_with(group):
        return said(group, "auto", wishes=Wishes(graph_capturable=group.rank == 0))

    errors = pool.run(with_files, empty, build_with, ranks=2)
    assert len(set(errors)) == 1
    assert "wishes must be the same on all ranks" in errors[0]


def test_what_only_one_rank_lacks_counts_for_all(pool, empty):
    """Rank 1 has no entry points: nothing is able on all ranks, and both say why."""

    def build_without(group):
        from epmoe.core import choosing

        real = choosing.candidates
        if group.rank == 1:
            choosing.candidates = lambda: {"00_reference": real()["00_reference"]}
        try:
            return said(group, "auto", wishes=Wishes(graph_capturable=True))
        finally:
            choosing.candidates = real

    errors = pool.run(with_files, empty, build_without, ranks=2)
    assert len(set(errors)) == 1
    assert "00_reference: is not graph capturable" in errors[0]
    assert "02_fixed_capacity: rank 1: is not registered" in errors[0]


def test_times_of_another_dtype_do_not_count(pool, tmp_path):
    other = replace(FIRST, situation=replace(FIRST.situation, dtype="float16"))
    path = str(measured.keep([other], tmp_path / "other.json"))
    for one in pool.run(with_files, [path] * 2, described, ranks=2):
        assert one["chosen_by"] == "ladder order"


def test_a_layer_in_half_precision_is_right_as_well(pool, empty):
    reports = pool.run(with_files, empty, run_case, replace(CASE, dtype=torch.bfloat16), ranks=2)
    assert all(r.right for r in reports), report(reports)
