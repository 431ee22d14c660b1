"""`epmoe tune` around a tuner: what it keeps, what it does not measure again, what it shows."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from epmoe.core import tune
from epmoe.core.commands.tune import guide
from epmoe.core.errors import InputError
from epmoe.core.groups import single

QUIET = Console(quiet=True)


@pytest.fixture
def measured(monkeypatch):
    """The numbers of tokens that were measured by a stage whose entries hold one width."""
    counts = []

    def situation(_, request):
        return {"for": {"tokens": request.tokens}, "versions": {}}

    def measure(group, request):
        counts.append(request.tokens)
        entry = {"device": "a GPU", "width": 10 * request.tokens, "tried": 3, "failed": 1}
        entry["ranks"] = request.ranks
        return entry | situation(group, request)

    tuner = tune.Tuner(situation, measure, columns=("width",), cells=lambda e: [str(e["width"])])

    @contextlib.contextmanager
    def runner(*_):
        yield (lambda program, request: program(single("cpu"), request)), "cpu"

    monkeypatch.setattr(tune, "tuner_of", lambda stage: tuner)
    monkeypatch.setattr(tune, "runner", runner)
    return counts


def tuned(path, tokens):
    data, table = guide(QUIET, "any", "tiny", 2, tokens, False, "cpu", "auto", 4, path, 60.0)
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return data, [column.header for column in table.columns], list(rows)


def test_the_stage_brings_columns_and_what_is_there_is_kept(measured, tmp_path):
    path = tmp_path / "new" / "tuning.json"
    _, heads, rows = tuned(path, "1,8")
    assert heads == ["T", "", "width", "tried", "failed"]
    assert rows == [("1", "new", "10", "3", "1"), ("8", "new", "80", "3", "1")]
    data, _, rows = tuned(path, "8,2")
    assert [row[:3] for row in rows] == [("8", "kept", "80"), ("2", "new", "20")]
    assert measured == [1, 8, 2]
    assert json.loads(path.read_text())["entries"] == data["entries"]


@pytest.mark.parametrize(("loopback", "ranks"), [(False, 3), (True, 2)])
def test_entries_are_for_the_ranks_of_torchruns_world(
    measured, monkeypatch, tmp_path, loopback, ranks
):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    data, _ = guide(
        QUIET, "any", "tiny", 2, "1", loopback, "cpu", "auto", 4, tmp_path / "t.json", 60.0
    )
    assert [entry["ranks"] for entry in data["entries"]] == [ranks]


def test_ranks_to_tune_on_are_torchruns_world(monkeypatch):
    opened = []

    @contextlib.contextmanager
    def open_ranks(ranks, device):
        opened.append(ranks)
        yield SimpleNamespace(choice=SimpleNamespace(device_type=device))

    monkeypatch.setattr(tune, "open_ranks", open_ranks)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with tune.runner(1, False, "cpu", 60.0) as (_, where):
        assert (opened, where) == ([3], "cpu")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_under_torchrun_rank_0_alone_writes(measured, monkeypatch, tmp_path, rank):
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "tuning.json"
    data, _, _ = tuned(path, "1,8,1")
    assert [entry["for"] for entry in data["entries"]] == [{"tokens": 1}, {"tokens": 8}]
    assert measured == [1, 8], "every rank knows what has been measured"
    assert path.exists() == (rank == "0")


def test_a_file_of_another_device_is_refused_on_every_rank(measured, monkeypatch, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"device": "another", "entries": [], "stages": []}))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="is for another, this is a GPU"):
        tuned(path, "1")


def test_weights_that_do_not_fit_are_refused_before_anything_is_measured(
    measured, monkeypatch, tmp_path
):
    monkeypatch.setattr("epmoe.core.room.available_memory_gib", lambda: 0.001)
    with pytest.raises(InputError, match=r"2 layers of tiny .*0\.0 are free: use --shape tiny"):
        tuned(tmp_path / "tuning.json", "1")
    assert measured == []
