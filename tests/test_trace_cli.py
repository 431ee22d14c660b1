"""`epmoe trace` from the command line to files: the trace keeps the format's rules, and its numbers add up."""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from epmoe.core import groups, traces
from epmoe.core.cli import app
from epmoe.core.errors import InputError
from epmoe.core.timeline import RankRecord, Report
from epmoe.core.timeline.cli import render
from epmoe.core.timeline.events import chrome_trace

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-glm-moe"
REQUIRED = {"M": {"name", "args"}, "X": {"name", "cat", "ts", "dur"}, "C": {"name", "ts", "args"}}


def trace(*words: str):
    return CliRunner().invoke(app, ["trace", *words, "--device", "cpu"], catch_exceptions=False)


def problems(file: dict) -> list[str]:
    """What breaks the rules of the Trace Event Format, in words; knows nothing of the code under test."""
    found, open_until, last = [], defaultdict(list), -math.inf
    if file.get("displayTimeUnit") not in ("ms", "ns"):
        found.append("displayTimeUnit")
    for number, event in enumerate(file["traceEvents"]):
        kind, what = event.get("ph"), f"event {number} ({event.get('name')})"
        missing = (REQUIRED.get(kind, {"ph"}) | {"pid", "tid"}) - set(event)
        if missing or kind not in REQUIRED:
            found.append(f"{what}: ph {kind}, without {missing}")
            continue
        if not all(isinstance(event[key], int) and event[key] > 0 for key in ("pid", "tid")):
            found.append(f"{what}: pid and tid are whole numbers above 0")
        if kind == "M":
            continue
        if not math.isfinite(event["ts"]) or event["ts"] < max(last, 0):
            found.append(f"{what}: not in the order of time")
        last = event["ts"]
        if kind == "C":
            if not all(isinstance(n, int) for n in event["args"].values()):
                found.append(f"{what}: a counter counts")
            continue
        if event["dur"] < 0:
            found.append(f"{what}: ends before it begins")
        stack, end = open_until[event["pid"], event["tid"]], event["ts"] + event["dur"]
        while stack and stack[-1] <= event["ts"] + 1e-6:
            stack.pop()
        if stack and end > stack[-1] + 1e-6:
            found.append(f"{what}: ends after the phase that it is part of")
        stack.append(end)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One run on two ranks with everything: the trace, the report and the stepper's JSON."""
    folder = tmp_path_factory.mktemp("trace")
    files = {name: folder / f"{name}.json" for name in ("out", "json", "stepper")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    done = trace("02", "--ep", "2", "--tokens", "3", "--calls", "2", *words)
    assert done.exit_code == 0, done.output
    return {name: json.loads(file.read_text()) for name, file in files.items()} | {
        "said": done.output
    }


def slices(written: dict, rank: int, call: int) -> list[str]:
    return [
        e["name"]
        for e in written["out"]["traceEvents"]
        if (e["ph"], e["pid"], e.get("args", {}).get("call")) == ("X", rank + 1, call)
    ]


def test_the_trace_keeps_the_rules_of_its_format(written):
    assert problems(written["out"]) == []


def test_every_rank_is_a_process_with_all_phases_of_every_call(written):
    names = {
        e["pid"]: e["args"]["name"]
        for e in written["out"]["traceEvents"]
        if (e["ph"], e["name"]) == ("M", "process_name")
    }
    assert names == {1: "rank 0", 2: "rank 1"}
    for rank in (0, 1):
        for call in (0, 1):
            found = [n for n in slices(written, rank, call) if n not in ("pack", "merge", "other")]
            assert found == [
                *("route", "call", "dispatch", "exchange", "experts", "combine", "exchange")
            ]
            assert {"pack", "merge", "other"} <= set(slices(written, rank, call))


def test_counters_hold_the_rows_of_the_table(written):
    """Fixed capacity gives every rank EP * T rows a call; needed and computed ones are in the report."""
    counted = defaultdict(int)
    for event in written["out"]["traceEvents"]:
        if event["ph"] == "C":
            for name, rows in event["args"].items():
                counted[name] += rows
    report = Report.from_dict(written["json"])
    assert counted["given"] == sum(report.routing.delivered) == 2 * 2 * 2 * 3
    assert counted["needed"] == sum(report.routing.needed)
    assert (
        counted["computed"] == report.computed >= sum(report.routing.assignments) == 2 * 2 * 3 * 4
    )


def test_the_table_is_the_trace_s(written):
    """A phase's time in the report is the median of its slices in the trace; of two calls, the mean."""
    report = Report.from_dict(written["json"])
    (experts,) = [time for time in report.times if time.path == ("call", "experts")]
    for rank in (0, 1):
        found = [
            e["dur"]
            for e in written["out"]["traceEvents"]
            if (e["ph"], e["name"], e["pid"]) == ("X", "experts", rank + 1)
        ]
        assert experts.by_rank[rank] == pytest.approx(sum(found) / 2 * 1e-6, abs=2e-9)
    for words in ("waiting", "  experts", "a call", "ui.perfetto.dev", "clocks agree"):
        assert words in written["said"]


def test_a_report_comes_back_from_json_and_shows_the_same(written):
    report = Report.from_dict(written["json"])
    again = Report.from_dict(json.loads(json.dumps(report.as_dict())))
    assert again == report
    shown = []
    for one in (report, again):
        console = Console(width=100)
        with console.capture() as said:
            console.print(render(one))
        shown.append(said.get())
    assert shown[0] == shown[1]
    assert report.setting["stage"] == "02_fixed_capacity"
    assert report.setting["calls"] == 2
    assert report.machine["torch"] == torch.__version__
    # two calls of 24 assignments each, over 16 experts a rank: one call names fewer than both
    for one, both in zip(report.active, report.routing.active, strict=True):
        assert 0 < one < both <= 16
    with pytest.raises(InputError, match="no report as `epmoe trace --json` writes it"):
        Report.from_dict({"kind": "layer"})


def test_the_stepper_is_given_a_trace_of_the_site(written):
    played = written["stepper"]
    assert (played["format"], played["stage"], played["ranks"]) == (
        traces.FORMAT,
        "02_fixed_capacity",
        2,
    )
    assert played["scenario"]["name"] == "uniform-r2-e8-k2"
    assert "x0" not in played["delivered"][0][0]


def test_broken_traces_are_noticed(written):
    """The rules above can fail, one by one."""
    for change, words in (
        (lambda e: e.pop("dur"), "without {'dur'}"),
        (lambda e: e.update(dur=e["dur"] + 1e6), "ends after the phase"),
        (lambda e: e.update(dur=-1.0), "ends before it begins"),
        (lambda e: e.update(ts=0.0), "not in the order of time"),
        (lambda e: e.update(pid=0), "whole numbers above 0"),
        (lambda e: e.update(ph="Z"), "ph Z"),
    ):
        broken = json.loads(json.dumps(written["out"]))
        change(next(e for e in broken["traceEvents"] if e["name"] == "experts"))
        assert any(words in problem for problem in problems(broken)), words


def test_a_layer_without_such_phases_has_no_rows_to_count(written):
    nothing = {"spans": [], "skipped": 0, "aligned_within": 0.0, "routing": []}
    record = RankRecord(computed=[3], layer={}, machine={}, **nothing)
    assert record.given is None
    file = chrome_trace([record], Report.from_dict(written["json"]))
    assert {event["ph"] for event in file["traceEvents"]} == {"M"}


class HereRanks:
    """One rank, in this process."""

    choice = SimpleNamespace(device_type="cpu")

    def __enter__(self) -> "HereRanks":
        return self

    def __exit__(self, *exception: object) -> None: ...

    def describe(self) -> str:
        return "one rank, here"

    def run(self, program, run, timeout: float):
        return [program(groups.single(), run)]


def test_a_checkpoint_s_own_routing_of_text(tmp_path, monkeypatch):
    """The layer in the middle and its router, on what the model makes of a text (which is not read here)."""
    asked = []

    def hidden_states(model, layer, words, tokens):
        asked.append((model, layer, len(words) >= 8 * tokens))
        return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(0))

    monkeypatch.setattr("epmoe.core.timeline.cli.hidden_states", hidden_states)
    monkeypatch.setattr("epmoe.core.timeline.cli.open_ranks", lambda *_: HereRanks())
    out = tmp_path / "t.json"
    words = ("--ep", "1", "--tokens", "16", "--calls", "1", "--model", str(MODEL))
    done = trace("variable_a2a", *words, "--out", str(out), "--json", "-")
    assert done.exit_code == 0, done.output
    assert asked == [(MODEL, 3, True)]
    file = json.loads(out.read_text())
    assert problems(file) == []
    assert "layer 3 of tiny-glm-moe" in file["otherData"]["what"]
    report = Report.from_dict(json.loads(done.stdout))
    assert report.routing.tokens == (16,)
    assert report.routing.expert_imbalance > 1.5, "real routing is uneven"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["no_such_stage"], "no stage called"),
        (["02", "--out", "/no/such/folder/t.json"], "name a file in a folder that exists"),
        (["02", "--routing", "zipf:much"], "routing='zipf:much': give a number behind"),
        (["02", "--routing", "masked"], "choose one of uniform"),
        (["02", "--model", str(MODEL), "--routing", "zipf"], "a model routes by itself"),
        (["02", "--ep", "5", "--stepper", "s.json"], "--stepper plays 2, 3, 4 ranks, not 5"),
        (["02", "--placement", "nowhere"], "placement='nowhere'"),
    ],
)
def test_bad_words_are_refused_before_a_rank_starts(words, reason, monkeypatch):
    monkeypatch.setattr(
        "epmoe.core.timeline.cli.open_ranks", lambda *_: pytest.fail("started ranks")
    )
    with pytest.raises(InputError, match=reason):
        trace(*words)


def test_under_torchrun_the_stepper_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="run it without torchrun"):
        trace("02", "--stepper", "s.json")
