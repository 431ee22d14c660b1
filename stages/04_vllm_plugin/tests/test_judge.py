"""Judging runs and showing them, with answers made up for the purpose; no vLLM needed."""

import io
import math

import pytest
from rich.console import Console

from epmoe.vllm_plugin import view
from epmoe.vllm_plugin.compare import Comparison, Plan
from epmoe.vllm_plugin.jobs import Answer, Job, Request
from epmoe.vllm_plugin.judge import Outcome, first_difference, judge, largest, logprob_distances
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


def outcome(*answers, sabotage=None, order=None, tp=1) -> Outcome:
    order = order or [[0, 1]]
    requests = [[REQUESTS[index] for index in some] for some in order]
    job = Job(model="m", stage=STAGE, requests=requests, dp=len(order), tp=tp, sabotage=sabotage)
    return Outcome(job, list(answers), order)


NATIVE_RUN = outcome(answer([[1, 2], [3, 4]], seconds=[2.0, 2.0]))


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


@pytest.mark.parametrize(
    ("spoilt", "seen"),
    [
        ([[1, 2], [3, 4]], False),
        ([[1, 8], [3, 4]], True),
        ([], False),
        ([[1, 8]], False),
        ([[1, 8], [3]], False),
    ],
    ids=["same", "other", "none", "one prompt missing", "one token missing"],
)
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


def test_the_yardstick_may_differ_but_a_stage_must_not_have_run():
    other = outcome(answer([[1, 9], [3, 4]]))
    result = judge(NATIVE_EAGER, [other], [NATIVE_RUN])
    assert not result.equal
    assert result.right
    assert not judge(STAGE, [other], [NATIVE_RUN]).right
    staged = outcome(answer([[1, 2], [3, 4]], [layer()]))
    assert not judge(NATIVE_EAGER, [staged], [NATIVE_RUN]).right


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


def shown(results) -> str:
    console = Console(width=220, record=True, file=io.StringIO(), force_terminal=True)
    console.print(view.table(Comparison(plan=PLAN, machine={}, results=results)))
    return console.export_text(styles=True)


RED = "\x1b[31m"


def test_what_the_yardstick_may_is_not_shown_in_red():
    other = outcome(answer([[1, 9], [3, 4]]))
    text = shown([judge(NATIVE_EAGER, [other], [NATIVE_RUN])])
    assert "prompt 0, token 1: 9 for 2" in text
    assert RED not in text
    wrong = outcome(answer([[1, 9], [3, 4]], [layer()]))
    assert f"{RED}prompt 0, token 1: 9 for 2" in shown([judge(STAGE, [wrong], [NATIVE_RUN])])


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", [STAGE, NATIVE, NATIVE_EAGER])
def test_tensor_parallel_ranks_that_differ_are_wrong_whichever_is_right(name, odd):
    layers = [layer()] if name == STAGE else []
    ids = [[[1, 2], [3, 4]], [[1, 2], [3, 4]]]
    answers = [answer(some, layers) for some in ids]
    assert judge(name, [outcome(*answers, tp=2)], [NATIVE_RUN]).right
    answers[odd] = answer([[1, 2], [3, 9]], layers)
    result = judge(name, [outcome(*answers, tp=2)], [NATIVE_RUN])
    assert not result.agreed
    assert not result.right
    assert f"{RED}tensor-parallel ranks differ" in shown([result])


def test_tensor_parallel_ranks_of_several_data_parallel_ones():
    """Ranks 0 and 1 hold prompt 0, ranks 2 and 3 prompt 1."""
    places = [[[1, 2]], [[1, 2]], [[3, 4]], [[3, 4]]]
    run = outcome(*(answer(ids, [layer()]) for ids in places), order=[[0], [1]], tp=2)
    assert [copy.ids for copy in run.copies()] == [[[1, 2], [3, 4]]] * 2
    assert judge(STAGE, [run], [NATIVE_RUN]).right


def test_distances_are_those_of_every_run():
    """The run with the other text is near; the one with the same text is far off."""
    far = outcome(answer([[1, 2], [3, 4]], [layer()], value=-2.5))
    near = outcome(answer([[1, 2], [3, 9]], [layer()]))
    for runs in ([far, near], [near, far]):
        result = judge(STAGE, runs, [NATIVE_RUN])
        assert not result.equal
        assert result.max_logprob_distance == 2.0


def test_every_run_has_to_notice_the_sabotage():
    seen, missed = (
        outcome(answer([[1, 2], [3, 4]], [layer()], spoilt=spoilt), sabotage=0)
        for spoilt in ([[1, 8], [3, 4]], [[1, 2], [3, 4]])
    )
    assert judge(STAGE, [seen, seen], [NATIVE_RUN]).sabotage_seen
    assert judge(STAGE, [seen, missed], [NATIVE_RUN]).sabotage_seen is False


@pytest.mark.parametrize("distances", [[math.nan, 1.0], [1.0, math.nan]])
def test_the_largest_distance_keeps_a_nan_wherever_it_stands(distances):
    assert math.isnan(largest(distances))
    assert (largest([0.5, 3.0]), largest([])) == (3.0, 0.0)


def test_tokens_that_both_rule_out_are_no_distance_apart():
    never = [[{"1": -math.inf}]]
    assert logprob_distances([[1]], [[1]], never, never) == [0.0]


@pytest.mark.parametrize("name", [STAGE, NATIVE_EAGER])
def test_a_log_probability_that_is_nan_is_wrong(name):
    bad = outcome(answer([[1, 2], [3, 4]], [layer()] if name == STAGE else [], value=math.nan))
    result = judge(name, [bad], [NATIVE_RUN])
    assert result.equal
    assert math.isnan(result.max_logprob_distance)
    assert not result.right
    assert f"{RED}nan" in shown([result])
    comparison = Comparison(plan=PLAN, machine={}, results=[result])
    assert "nan" in view.picture(comparison).svg()
