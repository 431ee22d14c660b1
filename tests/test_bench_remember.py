"""`epmoe bench --remember`: from a run to what `auto` chooses by."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from epmoe.core import measured, own_file
from epmoe.core.bench import remember, results
from epmoe.core.bench.results import Measured
from epmoe.core.capabilities import Spec
from epmoe.core.choosing import select
from epmoe.core.cli import app
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.ranks import transport
from epmoe.core.shape import SHAPES

COMMITTED = Path(__file__).resolve().parents[1] / "benchmarks/results/h200-loopback-ep4.json"
QUICK = ["--draws", "1", "--blocks", "2", "--replays", "2", "--layers", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "own.json"
    monkeypatch.setenv(own_file.VARIABLE, str(path))
    return path


def invoke(*words: str):
    return CliRunner().invoke(app, words)


def test_a_run_decides_what_is_chosen(own):
    """The file holds exactly the medians of the result, and `stages --why` says that they decided."""
    setting = ["--shape", "tiny", "--ep", "2", "--tokens", "2,3"]
    done = invoke(
        "bench", *setting, "--subjects", "01,02,fixed_capacity+loop,grouped_mm", *QUICK,
        "--remember", "--json", "-",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "2 comparisons of stages in" in done.stderr
    points = json.loads(done.stdout)["points"]
    for one, point in zip(measured.read(own), points, strict=True):
        assert one.situation.tokens == point["tokens"]
        times = {name: subject["median_us"] for name, subject in point["subjects"].items()}
        times.pop("grouped_mm")
        assert one.microseconds == times
        assert len(times) == 3
    asked = ["--shape", "tiny", "--ranks", "2", "--tokens", "3", "--device", "cpu"]
    chosen = json.loads(invoke("stages", "--why", *asked, "--json", "-").stdout)
    assert chosen["by"].startswith("measured: ")
    assert "T=3 on cpu" in chosen["by"]


def test_the_committed_run_says_what_wins_on_its_gpu():
    """Loopback on an H200, as the site's tables show it: at every T the fastest of those that run in loopback."""
    found = remember.comparisons(results.load(COMMITTED))
    assert len(found) > 1
    assert {one.device for one in found} == {"NVIDIA H200"}
    for one in found:
        spec = Spec(
            dtype=torch.bfloat16, device="cuda", device_name=one.device, transport="loopback",
            ranks=4, tokens=one.situation.tokens, shape=SHAPES["glm-5.3-flash"],
        )  # fmt: skip
        selection = select(spec, comparisons=found)
        assert selection.by.startswith("measured: ")
        fastest = min(one.microseconds, key=lambda name: one.microseconds[name])
        assert selection.chosen == fastest == "03_fused_triton"


def test_what_failed_or_was_changed_is_not_kept():
    result = results.load(COMMITTED)
    for point in result.points:
        stages = [name for name in point.subjects if name[:1].isdigit()]
        point.subjects[stages[0]] = Measured(mode="none", error="its gates")
        for name in ("03_fused_triton:-pack", "fixed_capacity+triton:-pack"):
            point.subjects[name] = point.subjects[stages[1]]
    assert remember.comparisons(result) == [], "one stage alone is no comparison"


def test_a_file_that_cannot_be_kept_stops_the_run_before_it_starts(own):
    words = ["bench", "--shape", "tiny", "--ep", "2", "--tokens", "2", *QUICK, "--remember"]
    own.write_text("{")
    assert "is no tuning file" in str(invoke(*words).exception)
    own.write_text(json.dumps({"device": "NVIDIA H200", "entries": [], "stages": []}))
    error = invoke(*words).exception
    assert isinstance(error, InputError)
    assert "is for NVIDIA H200, this is cpu" in str(error)


def test_a_place_that_is_no_file_stops_the_run_before_it_starts(tmp_path, monkeypatch):
    words = ["bench", "--shape", "tiny", "--ep", "2", "--tokens", "2", *QUICK, "--remember"]
    monkeypatch.setattr("epmoe.core.bench.cli._run", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "tuning.json"):
        monkeypatch.setenv(own_file.VARIABLE, str(place))
        error = invoke(*words).exception
        assert isinstance(error, InputError)
        assert f"{place} cannot be written" in str(error)
    with pytest.raises(InputError, match="is a folder, no tuning file"):
        own_file.load(tmp_path)


def test_the_answer_is_given_even_if_it_can_no_longer_be_kept(own, monkeypatch):
    monkeypatch.setattr("epmoe.core.bench.cli._run", lambda *_: results.load(COMMITTED))
    monkeypatch.setattr(remember, "check", lambda *_: None)
    own.mkdir()
    done = invoke("bench", "--remember")
    assert isinstance(done.exception, InputError)
    assert "Microseconds per layer" in done.stdout


def test_ranks_that_share_a_gpu_are_not_remembered(monkeypatch):
    shared = transport.Choice(4, "nccl", "cuda", 1, True, "4 ranks share cuda:0 over NCCL 2.30.1")
    monkeypatch.setattr(remember, "choose_here", lambda ranks, device: shared)
    with pytest.raises(UnsupportedError, match=r"4 ranks share cuda:0.*leave --remember out"):
        remember.check("cuda", 4, False)
