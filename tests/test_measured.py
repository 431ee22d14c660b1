"""Stages that were timed: what counts for which layer, ties, and the file that keeps the times."""

import json
from dataclasses import replace

import pytest
import torch
from tests.stage_makers import stage

from epmoe.core import measured, own_file
from epmoe.core.capabilities import Spec
from epmoe.core.choosing import LADDER_ORDER, select
from epmoe.core.errors import InputError
from epmoe.core.measured import Comparison, Situation
from epmoe.core.shape import SHAPES

TINY = SHAPES["tiny"]


PINNED = stage(options=("steady",), grants={"batch_invariant": {"steady": True}})
LAYER = Spec(
    dtype=torch.bfloat16,
    device="cuda",
    device_name="NVIDIA H200",
    transport="nccl",
    ranks=4,
    tokens=8,
    shape=TINY,
)
STAGES = {"00_slow": stage(), "01_other": stage(), "02_fast": stage(graph_capturable=True)}


def comparison(times: dict, tokens: int = 8, device: str = "NVIDIA H200", **changes) -> Comparison:
    situation = Situation(
        transport="nccl", dtype="bfloat16", hidden=TINY.hidden, intermediate=TINY.intermediate,
        experts=TINY.experts, topk=TINY.topk, ranks=4, tokens=tokens,
    )  # fmt: skip
    return Comparison(
        device=device,
        situation=replace(situation, **changes),
        microseconds=times,
        created="2026-11-29T12:00:00+00:00",
        versions={"torch": "2.11.0", "triton": None},
    )


TIMES = {"00_slow": 20.0, "01_other": 10.0, "02_fast": 15.0}


def test_measured_wins_over_ladder_order():
    found = select(LAYER, STAGES, [comparison(TIMES)])
    assert found.chosen == "01_other"
    assert found.by == ("measured: 10.0 us, T=8 on NVIDIA H200, 2026-11-29 (torch 2.11.0)")
    assert found.reasons == {
        "00_slow": ["could serve this in 20.0 us, 01_other takes 10.0 us"],
        "02_fast": ["could serve this in 15.0 us, 01_other takes 10.0 us"],
    }


def test_the_fastest_that_cannot_serve_is_not_taken():
    able = replace(LAYER, graph_capturable=True)
    found = select(able, {**STAGES, "03_last": stage(graph_capturable=True)}, [
        comparison({**TIMES, "03_last": 30.0})
    ])  # fmt: skip
    assert found.chosen == "02_fast"
    assert found.by.startswith("measured: 15.0 us")


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "NVIDIA B200"},
        {"dtype": "float16"},
        {"hidden": 64},
        {"intermediate": 128},
        {"experts": 64},
        {"topk": 2},
        {"ranks": 8},
        {"transport": "loopback"},
        {"tokens": 3},
        {"tokens": 17},
    ],
    ids=lambda changes: "-".join(f"{k}-{v}" for k, v in changes.items()),
)
def test_measurements_of_something_else_are_ignored(changes):
    found = select(LAYER, STAGES, [comparison(TIMES, **changes)])
    assert (found.chosen, found.by) == ("02_fast", LADDER_ORDER)


def test_the_nearest_number_of_tokens_counts():
    far, near = comparison(TIMES, tokens=16), comparison({**TIMES, "02_fast": 5.0}, tokens=6)
    assert select(LAYER, STAGES, [far]).chosen == "01_other"
    for order in ([far, near], [near, far]):
        found = select(LAYER, STAGES, order)
        assert found.chosen == "02_fast"
        assert "T=6" in found.by
    assert "T=4" in select(LAYER, STAGES, [far, comparison(TIMES, tokens=4)]).by


@pytest.mark.parametrize("order", [1, -1])
def test_ties_are_decided_by_the_ladder(order):
    """Less than 2% is a tie with the order's choice; equal times go to the later rung, in whatever order they lie."""

    def choose(**times):
        return select(LAYER, STAGES, [comparison(dict(list(times.items())[::order]))]).chosen

    assert choose(**{"00_slow": 10.0, "01_other": 10.0, "02_fast": 20.0}) == "01_other"
    assert choose(**{"00_slow": 9.9, "01_other": 20.0, "02_fast": 10.0}) == "02_fast"
    assert choose(**{"00_slow": 9.7, "01_other": 20.0, "02_fast": 10.0}) == "00_slow"


@pytest.mark.parametrize(
    "times",
    [{"00_slow": 10.0, "01_other": 20.0}, {"02_fast": 10.0}],
    ids=["without-the-last-rung", "alone"],
)
def test_a_comparison_without_the_order_s_choice_decides_nothing(times):
    found = select(LAYER, STAGES, [comparison(times)])
    assert (found.chosen, found.by) == ("02_fast", LADDER_ORDER)


def test_who_was_not_measured_is_said_so():
    found = select(LAYER, STAGES, [comparison({"00_slow": 10.0, "02_fast": 20.0})])
    assert found.reasons["01_other"] == ["could serve this, but was not measured with 00_slow"]


def test_times_of_default_options_say_nothing_about_others():
    """01_other is slower measured plainly; with the option that grants batch invariance nobody measured it."""
    stages = {"00_slow": stage(batch_invariant=True), "01_fast": PINNED}
    plain = comparison({"00_slow": 10.0, "01_fast": 20.0})
    assert select(LAYER, stages, [plain]).chosen == "00_slow"
    found = select(replace(LAYER, batch_invariant=True), stages, [plain])
    assert (found.chosen, found.by) == ("01_fast", LADDER_ORDER)


def test_comparisons_survive_the_file_beside_tiles(tmp_path):
    path = tmp_path / "deep" / "own.json"
    tiles = {"for": {"tokens": 8}, "gate_up": {}, "down": {}}
    own_file.add(own_file.load(path), own_file.TILES, "NVIDIA H200", tiles, path)
    one, other = comparison(TIMES), comparison(TIMES, tokens=64)
    assert measured.keep([one, other], path) == path
    assert measured.read(path) == [one, other]
    newer = comparison({"00_slow": 1.0, "01_other": 2.0})
    measured.keep([newer], path)
    assert measured.read(path) == [other, newer], "the newer one of the same situation replaces"
    assert own_file.load(path)[own_file.TILES] == [tiles]
    with pytest.raises(InputError, match="is for NVIDIA H200, this is cpu"):
        measured.keep([comparison(TIMES, device="cpu")], path)


def test_nothing_measured_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv(own_file.VARIABLE, str(tmp_path / "none.json"))
    assert measured.read() == []
    assert select(LAYER, STAGES).by == LADDER_ORDER


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda entry: entry["for"].pop("topk"), "its situation has"),
        (lambda entry: entry["for"].update(tokens=0), "tokens is 0, not a whole number"),
        (lambda entry: entry["for"].update(ranks=True), "ranks is True, not a whole number"),
        (lambda entry: entry["for"].update(dtype=3), "dtype is 3, not a name"),
        (lambda entry: entry.update(microseconds={}), "not a time by stage"),
        (lambda entry: entry["microseconds"].update(a=-1.0), "the time of a is -1.0"),
        (lambda entry: entry["microseconds"].update(a=float("nan")), "the time of a is nan"),
        (lambda entry: entry["microseconds"].update(a="10"), "the time of a is '10'"),
        (lambda entry: entry.pop("created"), "does not say when it was created"),
        (lambda entry: entry.pop("for"), "is no tuning file"),
    ],
)
def test_a_broken_file_is_an_error_with_the_fix(tmp_path, monkeypatch, damage, words):
    path = tmp_path / "own.json"
    measured.keep([comparison(TIMES), comparison(TIMES, tokens=64)], path)
    data = json.loads(path.read_text())
    damage(data["stages"][1])
    path.write_text(json.dumps(data))
    monkeypatch.setenv(own_file.VARIABLE, str(path))
    with pytest.raises(InputError) as caught:
        select(LAYER, STAGES)
    said = str(caught.value)
    assert str(path) in said
    assert words in said
    assert "stages[1]: " in said or "move it away" in said
    path.write_text("{")
    with pytest.raises(InputError, match=r"is no tuning file.*move it away, or name another"):
        measured.read()
