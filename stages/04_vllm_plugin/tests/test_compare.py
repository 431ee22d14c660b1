"""What is run and in which order, what is refused, how ranks start and end; no vLLM needed."""

import io
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from epmoe.core.errors import InputError, RankFailedError, RunTimeoutError
from epmoe.vllm_plugin import commands, compare, engine_program, engines, view
from epmoe.vllm_plugin.compare import Plan, job_for, spread
from epmoe.vllm_plugin.jobs import Answer, Job, Request
from epmoe.vllm_plugin.judge import Outcome
from epmoe.vllm_plugin.settings import NATIVE, NATIVE_EAGER

STAGE = "02_fixed_capacity"
REQUESTS = [Request(ids=[1], tokens=2) for _ in range(5)]
PLAN = Plan(model="m", stages=(NATIVE, STAGE), prompts=("a", "b"), tokens=2)


def outcome(stage) -> Outcome:
    """One rank that wrote the text that native does, on `stage`."""
    layers = [] if stage == NATIVE else [{"layer": "l", "stage": stage, "calls": 4, "runs": None}]
    ids = [[1, 2], [3, 4]]
    found = Answer(
        ids=ids,
        spoilt_ids=[],
        logprobs=[[{str(token): -0.5} for token in row] for row in ids],
        report={"layers": layers},
        seconds=[],
        start_seconds=1.0,
        machine={"vllm": "0.32.0"},
    )
    return Outcome(Job(model="m", stage=stage, requests=[REQUESTS[:2]]), [found], [[0, 1]])


@pytest.mark.parametrize(
    ("ranks", "how", "expected"),
    [
        (1, "uneven", [[0, 1, 2, 3, 4]]),
        (2, "uneven", [[0, 1, 2, 3], [4]]),
        (3, "uneven", [[0, 2], [1, 3], [4]]),
        (2, "even", [[0, 2, 4], [1, 3]]),
        (2, "one", [[0, 1, 2, 3, 4], []]),
        (7, "uneven", [[0], [1], [2], [3], [4], [], []]),
    ],
)
def test_who_gets_which_prompt(ranks, how, expected):
    assert spread(REQUESTS, ranks, how) == expected


def test_native_has_one_rank_on_a_cpu_and_stages_their_graphs_on_a_gpu():
    plan = Plan(model="m", stages=(NATIVE, "01_variable_a2a"), dp=2, compiled=True)
    job, _ = job_for(plan, NATIVE, REQUESTS)
    assert (job.dp, job.eager) == (1, False)
    on_gpu = Plan(model="m", stages=(NATIVE, STAGE), dp=2, compiled=True, device="cuda")
    assert job_for(on_gpu, NATIVE, REQUESTS)[0].dp == 2
    assert not job_for(on_gpu, STAGE, REQUESTS)[0].eager
    assert job_for(on_gpu, "01_variable_a2a", REQUESTS)[0].eager


def test_the_yardstick_is_native_without_its_compiler():
    plan = Plan(model="m", stages=(NATIVE, NATIVE_EAGER), dp=2, compiled=True, device="cuda")
    job, _ = job_for(plan, NATIVE_EAGER, REQUESTS)
    assert (job.stage, job.dp, job.eager) == (NATIVE, 2, True)
    assert compare.resolve_stages("native,native-eager,02") == (NATIVE, NATIVE_EAGER, STAGE)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": (STAGE,)},
        {"stages": (NATIVE, STAGE, STAGE)},
        {"stages": (NATIVE, NATIVE_EAGER)},
        {"prompts": ()},
        {"spread": "odd"},
        {"device": "gpu"},
        {"options": {"01_variable_a2a": "{}"}},
    ],
    ids=str,
)
def test_plans_that_make_no_sense(changes):
    with pytest.raises(InputError):
        Plan(**{"model": "m", "stages": (NATIVE, STAGE)} | changes)


def test_prompts_from_a_file(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\nline\\nbreak\n")
    assert compare.read_prompts(tmp_path / "p.txt") == ("one", "line\nbreak")
    (tmp_path / "p.txt").write_text("\n")
    with pytest.raises(InputError, match="holds no prompt"):
        compare.read_prompts(tmp_path / "p.txt")
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\xff")
    for unreadable in ("p.txt", "absent.txt"):
        with pytest.raises(InputError, match=f"{unreadable}.*one prompt per line"):
            compare.read_prompts(tmp_path / unreadable)


def test_jobs_and_answers_survive_the_way_through_a_file(tmp_path):
    job, _ = job_for(PLAN, STAGE, REQUESTS[:2])
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job
    (one,) = outcome(STAGE).answers
    one.save(tmp_path / "answer.json")
    assert Answer.load(tmp_path / "answer.json") == one


def test_a_stage_that_fails_is_out_and_the_others_go_on(monkeypatch):
    """Two rounds: the failed stage is tried once, keeps its last words, and the comparison is not right."""
    tried = []

    def run_once(plan, stage, requests, python, stop):
        tried.append(stage)
        if stage == STAGE:
            raise RankFailedError("rank 0 failed:\nValueError: [too] small")
        return outcome(stage)

    other = "01_variable_a2a"
    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "tokenise", lambda model, prompts: [[1], [1]])
    plan = Plan(model="m", stages=(NATIVE, STAGE, other), prompts=("a", "b"), tokens=2, rounds=2)
    found = compare.compare(plan, "python", lambda words: None)
    assert tried == [NATIVE, STAGE, other, other, NATIVE]
    assert [one.stage for one in found.results] == [NATIVE, other]
    assert not found.right
    assert "too] small" in found.as_dict()["failed"][STAGE]
    shown = io.StringIO()
    Console(file=shown, width=200).print(view.with_last_words(found))
    assert f"{STAGE} failed: rank 0 failed:\nValueError: [too] small" in shown.getvalue()


def test_without_native_there_is_nothing_to_compare(monkeypatch):
    def run_once(plan, stage, requests, python, stop):
        raise RunTimeoutError("native: not done in time")

    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "tokenise", lambda model, prompts: [[1], [1]])
    with pytest.raises(RunTimeoutError, match="native"):
        compare.compare(PLAN, "python", lambda words: None)


def test_at_once_starts_every_engine_before_any_ends(monkeypatch):
    started = threading.Barrier(3, timeout=20)  # breaks, and the test fails, where they run in turn

    def run_once(plan, stage, requests, python, stop):
        started.wait()
        return outcome(stage)

    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "tokenise", lambda model, prompts: [[1], [1]])
    stages = (NATIVE, STAGE, "01_variable_a2a")
    plan = Plan(model="m", stages=stages, prompts=("a", "b"), tokens=2, device="cuda", at_once=True)
    found = compare.compare(plan, "python", lambda words: None)
    assert [one.stage for one in found.results] == list(stages)


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


def of_unknown_kind(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["Other"]}')


@pytest.mark.parametrize(
    ("damage", "sabotage", "words"),
    [
        (truncated, None, "is no whole safetensors file"),
        (None, 99, "sabotage=99: the model has experts 0 to 31"),
        (None, -1, "sabotage=-1: the model has experts 0 to 31"),
    ],
)
def test_what_every_engine_would_stumble_over_is_refused_before_one_starts(
    tmp_path, monkeypatch, tiny_model, damage, sabotage, words
):
    def never(*_):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(compare, "run_once", never)
    copied = shutil.copytree(tiny_model, tmp_path / "model")
    if damage:
        damage(copied)
    plan = Plan(model=str(copied), stages=(NATIVE, STAGE), sabotage=sabotage)
    with pytest.raises(InputError, match=words):
        compare.compare(plan, "python", lambda words: None)


def test_an_expert_to_spoil_is_looked_at_by_the_engine_where_only_it_can(tmp_path, tiny_model):
    copied = shutil.copytree(tiny_model, tmp_path / "model")
    of_unknown_kind(copied)
    compare.check_model(Plan(model=str(copied), stages=(NATIVE,), sabotage=99))
    with pytest.raises(InputError, match="sabotage=4: the model has experts 0 to 3"):
        engine_program.spoil(RoutedExperts(), 4)
    with pytest.raises(InputError, match="sabotage=-1"):
        engine_program.spoil(RoutedExperts(), -1)
    module = RoutedExperts()
    assert engine_program.spoil(module, 3) == 1
    assert module.w2_weight[:, 0, 0].tolist() == [1, 1, 1, -1]


class RoutedExperts(torch.nn.Module):
    """Of vLLM's by its name: all 4 experts on one rank, every weight 1."""

    expert_map = None

    def __init__(self):
        super().__init__()
        self.w2_weight = torch.nn.Parameter(torch.ones(4, 2, 2))


@pytest.mark.parametrize(
    ("changes", "why"), [({"repeats": 2}, "times"), ({"device": "cpu"}, "cpu")]
)
def test_at_once_is_refused_where_it_would_mislead(changes, why):
    with pytest.raises(InputError, match=why):
        Plan(**{**vars(PLAN), "device": "cuda", "at_once": True, **changes})


def test_at_once_a_native_that_fails_stops_the_others(monkeypatch):
    others = threading.Barrier(2, timeout=20)

    def run_once(plan, stage, requests, python, stop):
        others.wait()
        if stage == NATIVE:
            raise RankFailedError("native: rank 0 failed")
        assert stop.wait(20)
        raise RankFailedError("stopped")

    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "tokenise", lambda model, prompts: [[1], [1]])
    plan = Plan(**{**vars(PLAN), "device": "cuda", "at_once": True})
    with pytest.raises(RankFailedError, match="native"):
        compare.compare(plan, "python", lambda words: None)


def test_in_turn_no_stage_starts_after_a_native_that_fails(monkeypatch):
    tried = []

    def run_once(plan, stage, requests, python, stop):
        tried.append(stage)
        time.sleep(0.1)
        raise RankFailedError("no")

    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "tokenise", lambda model, prompts: [[1], [1]])
    with pytest.raises(RankFailedError):
        compare.compare(PLAN, "python", lambda words: None)
    assert tried == [NATIVE]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--prompts", "absent.txt"], "absent.txt"),
        (["--device", "gpu"], "cpu, cuda"),
        (["--stages", "native,02,02_fixed_capacity"], "twice"),
        (["--stages", "native,native-eager"], "--compiled"),
        (["--option", "02"], "= and JSON"),
        (["--option", "02=merge"], "is not JSON"),
        (["--option", ",={}"], "give a stage"),
        (["--json", "absent/out.json"], "cannot be written"),
        (["--json", "."], "cannot be written"),
        (["--plot", "speed.pdf"], ".svg or .png"),
        (["--plot", "absent/speed.svg"], "cannot be written"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, monkeypatch, tiny_model, words, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "compare", lambda *arguments: pytest.fail("it runs"))
    monkeypatch.setattr(engines, "find_python", lambda wanted: "python")
    given = ["compare", "--model", tiny_model, "--stages", "native,02", *words]
    error = CliRunner().invoke(commands.app, given).exception
    assert isinstance(error, InputError)
    assert why in str(error)


def test_results_are_there_even_if_the_plot_fails(tmp_path, monkeypatch, tiny_model):
    def run_once(plan, stage, requests, python, stop):
        return outcome(stage)

    def no_picture(comparison):
        raise RuntimeError("no picture")

    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "tokenise", lambda model, prompts: [[1], [1]])
    monkeypatch.setattr(engines, "find_python", lambda wanted: "python")
    monkeypatch.setattr(view, "picture", no_picture)
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    given = ["compare", "--model", tiny_model, "--stages", "native,02", "--json", str(out)]
    done = CliRunner().invoke(commands.app, [*given, "--plot", str(plot)])
    assert str(done.exception) == "no picture"
    assert '"right": true' in out.read_text()
