"""Replicas and masked ranks, where the stage declares them: values, and which replica serves whom.

`HOMES` have what matters: replicas with and without one at the source, more of one rank than of others, an expert that
is everywhere, and one whose only rank may go.
"""

from itertools import combinations

import pytest

from epmoe.core.cases import Case
from epmoe.core.conformance import mask_program, program
from epmoe.core.conformance.shapes import SMALL, steps

SHAPE = SMALL.with_(experts=6)
HOMES = {
    1: ((0,),) * 6,
    2: ((0, 1), (0,), (1,), (0, 1), (0,), (0,)),
    3: ((0, 1, 2), (0,), (1,), (0, 2), (1, 2), (2,)),
    4: ((0, 1, 2, 3), (0,), (1, 2), (1, 3), (2,), (0, 1)),
}


def case_of(stage: str, ranks: int, **changes) -> Case:
    usual = {"stage": stage, "shape": SHAPE, "tokens": steps(ranks), "placement": HOMES[ranks]}
    return Case(**{**usual, **changes})


# ---- replicas


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.large), pytest.param(4, marks=pytest.mark.large)]
)
def test_replicas(stage, check, ranks):
    check(case_of(stage, ranks))


@pytest.mark.large
@pytest.mark.parametrize("ranks", [2, 3])
def test_everything_everywhere(stage, check, ranks):
    """Every rank holds every expert: no row needs another rank."""
    everywhere = (tuple(range(ranks)),) * SHAPE.experts
    reports = check(case_of(stage, ranks, placement=everywhere, kind="duplicates"))
    for one in reports:
        for call in one.calls:
            assert call.rows_needed == call.tokens * SHAPE.topk


def test_hot_expert_is_served_by_turns(stage, check):
    """All tokens name expert 3 of ranks 1 and 3: they serve themselves, and 0 and 2 in turn."""
    rows = [[3, 1]] * 4
    case = case_of(stage, 4, tokens=((4, 4, 4, 4),), ids=((rows, rows, rows, rows),))
    reports = check(case)
    # expert 1 lives on rank 0 alone: 16 rows there; of expert 3's 16, half on each of its ranks
    assert [one.calls[0].rows_needed for one in reports] == [16, 8, 0, 8]


@pytest.mark.large
@pytest.mark.parametrize("gone", [(), (1,), (0, 3)], ids=str)
def test_rows_go_where_the_rule_says(stage, run, gone, capabilities):
    """Any replica would give the right values: what arrives at each slot is counted."""
    if gone and not capabilities.maskable:
        pytest.skip("not offered: is not maskable")
    case = case_of(stage, 4, tokens=((5, 1, 3, 4),), gone=gone, kind="duplicates")
    placement = case.placed()
    wanted = [[0] * len(placement.experts_of(rank)) for rank in range(4)]
    for source in range(4):
        owners, slots = placement.owners_from(source, gone), placement.slots_from(source, gone)
        for expert in case.routing(0, source)[0].flatten().tolist():
            if owners[expert] < 4:
                wanted[owners[expert]][slots[expert]] += 1
    counted = run(mask_program.served, case)
    if None in counted:
        pytest.skip("a whole layer does not show what arrives: its values are checked elsewhere")
    assert counted == wanted


@pytest.mark.large
def test_replicas_in_rounds_and_with_nan_around(stage, check):
    case = case_of(stage, 3, tokens=((5, 0, 1),), capacity=4, overflow="rounds", strided=True)
    check(case)


# ---- masked ranks


def subsets(ranks: int) -> list[tuple[int, ...]]:
    return [gone for n in range(1, ranks) for gone in combinations(range(ranks), n)]


@pytest.mark.large
@pytest.mark.parametrize("lost", ["drop", "renormalise"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_masked_ranks(stage, check, ranks, lost):
    """Whoever is gone: replicas take over, the rest is dropped by the rule, tokens of masked ranks are served."""
    tokens = ((3, 1, 4)[:ranks],)
    for gone in subsets(ranks):
        check(case_of(stage, ranks, tokens=tokens, gone=gone, lost=lost, check=True))


@pytest.mark.large
@pytest.mark.parametrize("lost", ["drop", "renormalise"])
def test_masked_ids_and_masked_ranks(stage, check, lost):
    """Ids of -1 do not count in what is scaled; a token that has nothing left is zero."""
    rows = [[1, -1], [1, 5], [2, 1], [-1, -1], [1, 1]]
    ids = ((rows, rows[:2], []),)
    check(case_of(stage, 3, tokens=((5, 2, 0),), ids=ids, gone=(0,), lost=lost))


@pytest.mark.parametrize("lost", ["drop", "renormalise"])
def test_masks_come_and_go(stage, run, lost):
    """One layer, masked and unmasked between calls: always what a layer that was built so would say."""
    case = case_of(stage, 3, tokens=((4, 2, 3),), lost=lost, check=True)
    for found in run(mask_program.come_and_go, case, ((1,), (0, 2), (), (2,))):
        assert all(row is None or row.right for row in found["rows"]), found["rows"]
        assert found["first_again"], "unmasked, the layer has other bits than before"
        assert found["gone"] == [[1], [0, 2], [], [2]]


def test_renormalised_logits(stage, run):
    """A stage that routes by itself renormalises too."""
    case = case_of(stage, 3, tokens=((4, 0, 3),), lost="renormalise", gone=(0,), declared=True)
    for rows in run(program.from_logits, case):
        assert all(row is None or row.right for row in rows), rows


MISTAKES = {
    "unknown": ["InputError", "rank 3 cannot be gone", "0 to 2"],
    "negative": ["InputError", "rank -1 cannot be gone"],
    "all": ["InputError", "all 3 ranks are gone"],
    "differ": ["DisagreementError", "gone", "rank 0 has (1,)", "rank 2 has (2,)"],
}


def test_10C_wrong_masks(stage, run):
    """The last rank masks something else: all raise the same, and the layer goes on as it was."""
    case = case_of(stage, 3, tokens=((4, 2, 3),), check=True)
    results = run(mask_program.mistakes, case)
    for name, words in MISTAKES.items():
        texts = {said[name] for said, _ in results}
        assert len(texts) == 1, (name, texts)
        (text,) = texts
        assert all(word in text for word in words), (name, text)
    for _, row in results:
        assert row.right, row


def test_a_stage_that_cannot_says_so(stage, run, capabilities):
    if capabilities.maskable:
        pytest.skip("the stage is maskable: see the other checks here")
    for said in run(mask_program.refused, Case(stage=stage, shape=SHAPE, tokens=((1, 1),))):
        assert said.startswith("UnsupportedError"), said
        assert "not maskable" in said, said


@pytest.mark.gpu
@pytest.mark.parametrize("lost", ["drop", "renormalise"])
def test_masks_reach_captured_graphs(stage, gpu_run, capabilities, lost):
    """One capture, masks changed between replays: the tables that a graph reads are written in place."""
    if not capabilities.graph_capturable:
        pytest.skip("not offered: the stage does not declare graph_capturable")
    for ranks in (2, 4):
        case = case_of(stage, ranks, tokens=((4, 2, 3, 0)[:ranks],), lost=lost, capacity=4)
        masks = ((), (1,), (0,), ())
        for found in gpu_run(mask_program.come_and_go, case, masks, True):
            assert all(row is None or row.right for row in found["rows"]), found["rows"]
            assert found["first_again"]
