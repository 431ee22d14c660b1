"""Judging runs and showing them, with answers made up for the purpose; no vLLM needed."""

import io
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from epmoe.core.errors import InputError, RankFailedError, RunTimeoutError, UnsupportedError
from epmoe.vllm_plugin import compare, engines, view
from epmoe.vllm_plugin.compare import Comparison, Plan, job_for, spread
from epmoe.vllm_plugin.jobs import Answer, Job, Request
from epmoe.vllm_plugin.judge import Outcome, first_difference, judge, logprob_distances
from epmoe.vllm_plugin.settings import NATIVE, NATIVE_EAGER

STAGE = "02_fixed_capacity"
REQUESTS = [Request(ids=[1], tokens=2) for _ in range(5)]
PLAN = Plan(model="m", stages=(NATIVE, STAGE), prompts=("a", "b"), tokens=2)


def layer(stage=STAGE, calls=4):
    return {"layer": "l", "stage": stage, "calls": calls, "runs": None}


def answer(ids, layers=(), seconds=(), spoilt=(), value=-0.5) -> Answer:
    return Answer(
        ids=ids,
        spoilt_ids=list(spoilt),
        logprobs=[[{str(token): value, "9": -3.0} for token in row] for row in ids],
        report={"layers": list(layers)},
        seconds=list(seconds),
        start_seconds=1.0,
        machine={"vllm": "0.32.0"},
    )


def outcome(*answers, sabotage=None, order=None) -> Outcome:
    order = order or [[0, 1]]
    requests = [[REQUESTS[index] for index in some] for some in order]
    job = Job(model="m", stage=STAGE, requests=requests, dp=len(order), sabotage=sabotage)
    return Outcome(job, list(answers), order)


NATIVE_RUN = outcome(answer([[1, 2], [3, 4]], seconds=[2.0, 2.0]))


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


def test_answers_come_back_in_the_order_of_the_prompts():
    run = outcome(answer([[5], [7]]), answer([[6]]), order=[[0, 2], [1]])
    assert run.in_order("ids") == [[5], [6], [7]]


def test_equal_text():
    result = judge(STAGE, [outcome(answer([[1, 2], [3, 4]], [layer()]))], [NATIVE_RUN])
    assert result.right
    assert (result.difference, result.max_logprob_distance) == (None, 0.0)


def test_the_first_other_token_and_how_near_it_was():
    found = first_difference([[1, 2], [3, 4]], [[1, 2], [3, 9]], NATIVE_RUN.in_order("logprobs"))
    assert found is not None
    assert (found.prompt, found.position, found.expected, found.found) == (1, 1, 4, 9)
    assert found.gap == pytest.approx(2.5)
    shorter = first_difference([[1, 2]], [[1]], [[{"1": 0.0}, {"2": 0.0}]])
    assert shorter is not None
    assert (shorter.position, shorter.expected, shorter.found, shorter.gap) == (1, 2, -1, None)


def test_distances_stop_where_texts_part():
    reference, ours = [[{"1": -1.0}, {"2": -1.0}]], [[{"1": -1.5}, {"2": -4.0}]]
    assert logprob_distances([[1, 2]], [[1, 2]], reference, ours) == [0.5, 3.0]
    assert logprob_distances([[1, 2]], [[9, 2]], reference, ours) == [0.5]


@pytest.mark.parametrize(
    "layers", [[], [layer(NATIVE)], [layer(calls=0)], [layer(), layer(NATIVE)]]
)
def test_equal_text_is_not_enough_when_other_code_ran(layers):
    result = judge(STAGE, [outcome(answer([[1, 2], [3, 4]], layers))], [NATIVE_RUN])
    assert result.equal
    assert not result.right


def test_native_with_a_stage_in_it_is_no_native():
    run = outcome(answer([[1, 2], [3, 4]], [layer()]))
    assert not judge(NATIVE, [run], [run]).right


@pytest.mark.parametrize(("spoilt", "seen"), [([[1, 2], [3, 4]], False), ([[1, 8], [3, 4]], True)])
def test_a_sabotage_that_nobody_notices_is_a_failure(spoilt, seen):
    run = outcome(answer([[1, 2], [3, 4]], [layer()], spoilt=spoilt), sabotage=0)
    result = judge(STAGE, [run], [NATIVE_RUN])
    assert result.sabotage_seen is seen
    assert result.right is seen


def test_the_slowest_rank_is_the_time():
    order = [[0], [1]]
    ours = outcome(
        answer([[1, 2]], [layer()], [1.0, 1.0]),
        answer([[3, 4]], [layer()], [0.5, 0.1]),
        order=order,
    )
    result = judge(STAGE, [ours], [NATIVE_RUN])
    assert result.tokens_per_second == [4.0, 4.0]
    assert result.against_native == (2.0, 2.0, 2.0)


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


def test_the_yardstick_may_differ_but_a_stage_must_not_have_run():
    other = outcome(answer([[1, 9], [3, 4]]))
    result = judge(NATIVE_EAGER, [other], [NATIVE_RUN])
    assert not result.equal
    assert result.right
    assert not judge(STAGE, [other], [NATIVE_RUN]).right
    staged = outcome(answer([[1, 2], [3, 4]], [layer()]))
    assert not judge(NATIVE_EAGER, [staged], [NATIVE_RUN]).right


@pytest.mark.parametrize(
    "changes",
    [{"stages": (STAGE,)}, {"prompts": ()}, {"spread": "odd"}],
    ids=lambda c: next(iter(c)),
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


@pytest.mark.parametrize("seconds", [(), (1.0, 2.0)])
def test_table_and_picture_say_what_is_wrong(seconds):
    bad = outcome(answer([[1, 9], [3, 4]], [layer(NATIVE)], seconds))
    results = [judge(NATIVE, [NATIVE_RUN], [NATIVE_RUN]), judge(STAGE, [bad], [NATIVE_RUN])]
    comparison = Comparison(plan=PLAN, machine={}, results=results)
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(view.table(comparison))
    text = console.export_text()
    assert "prompt 0, token 1: 9 for 2" in text
    assert "other code ran" in text
    assert "<svg" in view.picture(comparison).svg()
    assert not comparison.as_dict()["right"]


def test_jobs_and_answers_survive_the_way_through_a_file(tmp_path):
    job, _ = job_for(PLAN, STAGE, REQUESTS[:2])
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job
    one = answer([[1, 2]], [layer()])
    one.save(tmp_path / "answer.json")
    assert Answer.load(tmp_path / "answer.json") == one


def test_a_python_without_vllm_is_named(monkeypatch):
    monkeypatch.setattr(engines, "has_vllm", lambda python: False)
    with pytest.raises(UnsupportedError, match=r"no vLLM in .*setup_vllm_env.py"):
        engines.find_python()


def program(tmp_path, monkeypatch, text: str) -> dict:
    (tmp_path / "rank_program.py").write_text(text)
    return {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}


def test_a_rank_that_fails_is_quoted_and_the_others_end(tmp_path, monkeypatch):
    env = program(
        tmp_path,
        monkeypatch,
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no')\ntime.sleep(60)",
    )
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed:.*ValueError: no"):
        engines.run_ranks("rank_program", tmp_path, sys.executable, env, 2, 30, "two ranks")


def test_shared_memory_that_ranks_leave_behind_goes_with_them(tmp_path, monkeypatch):
    name = f"/dev/shm/test-{tmp_path.name}-cpushm_0"
    env = program(tmp_path, monkeypatch, f"open({name!r}, 'w').close()")
    engines.run_ranks("rank_program", tmp_path, sys.executable, env, 1, 30, "one rank")
    assert not Path(name).exists()


def test_a_rank_that_hangs_is_ended(tmp_path, monkeypatch):
    """And says where it was."""
    text = "import time; from epmoe.core.ranks import stacks; stacks.tell_on_request()\n"
    text += (
        "def wait_for_ever():\n    print('waiting', flush=True); time.sleep(60)\nwait_for_ever()"
    )
    env = program(tmp_path, monkeypatch, text)
    with pytest.raises(RunTimeoutError, match=r"(?s)rank 0 said last:\nwaiting.* in wait_for_ever"):
        engines.run_ranks("rank_program", tmp_path, sys.executable, env, 1, 2, "one rank")
    left = subprocess.run(
        ["pgrep", "-f", f"{tmp_path}/job.json"], capture_output=True, text=True, check=False
    )
    assert left.stdout == ""


def test_a_stage_that_fails_is_out_and_the_others_go_on(monkeypatch):
    """Two rounds: the failed stage is tried once, keeps its last words, and the comparison is not right."""
    tried = []

    def run_once(plan, stage, requests, python):
        tried.append(stage)
        if stage == STAGE:
            raise RankFailedError("rank 0 failed:\nValueError: [too] small")
        found = answer([[1, 2], [3, 4]], layers=[] if stage == NATIVE else [layer(stage)])
        return outcome(found)

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
    def run_once(plan, stage, requests, python):
        raise RunTimeoutError("native: not done in time")

    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "tokenise", lambda model, prompts: [[1], [1]])
    with pytest.raises(RunTimeoutError, match="native"):
        compare.compare(PLAN, "python", lambda words: None)


def test_at_once_starts_every_engine_before_any_ends(monkeypatch):
    started = threading.Barrier(3, timeout=20)  # breaks, and the test fails, where they run in turn

    def run_once(plan, stage, requests, python):
        started.wait()
        return outcome(answer([[1, 2], [3, 4]], layers=[] if stage == NATIVE else [layer(stage)]))

    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "tokenise", lambda model, prompts: [[1], [1]])
    stages = (NATIVE, STAGE, "01_variable_a2a")
    plan = Plan(model="m", stages=stages, prompts=("a", "b"), tokens=2, device="cuda", at_once=True)
    found = compare.compare(plan, "python", lambda words: None)
    assert [one.stage for one in found.results] == list(stages)


@pytest.mark.parametrize(
    ("changes", "why"), [({"repeats": 2}, "times"), ({"device": "cpu"}, "cpu")]
)
def test_at_once_is_refused_where_it_would_mislead(changes, why):
    with pytest.raises(InputError, match=why):
        Plan(**{**vars(PLAN), "device": "cuda", "at_once": True, **changes})
