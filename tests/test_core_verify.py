"""The judge itself: it finds what is wrong, and its tolerance is tight."""

import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

from epmoe.core import cli, groups
from epmoe.core.block import MoEBlock, shared_expert
from epmoe.core.cases import Case
from epmoe.core.errors import InputError
from epmoe.core.numerics import sum_in_order, swiglu
from epmoe.core.placement import NAMED
from epmoe.core.routing import Router, RouterConfig
from epmoe.core.shape import MoEShape
from epmoe.core.verify import (
    build_case,
    call_once,
    chosen_rows,
    relative_error,
    report,
    run_case,
    tolerance,
    worst_row,
)
from epmoe.core.weights import ExpertWeights

SHAPE = MoEShape(hidden=64, intermediate=96, experts=8, topk=2)
CASE = Case(stage="00", shape=SHAPE, tokens=((6,), (0,), (3,)))


def judged(y_TH: torch.Tensor, case: Case = CASE):
    return worst_row(case, 0, 0, y_TH, case.weights_of(range(8)).to(torch.float64))


def right_answer(case: Case = CASE) -> torch.Tensor:
    layer = build_case(groups.single(), case)
    return layer(case.tokens_of(0, 0), *case.routing(0, 0))


def test_a_right_layer_is_right():
    one = run_case(groups.single(), CASE)
    assert one.right
    assert [c.rows_needed for c in one.calls] == [12, 0, 6]
    assert one.calls[1].worst is None
    assert "right" in report([one])
    assert (
        json.loads(json.dumps(one.as_dict()))["calls"][0]["worst"]["row"] == one.calls[0].worst.row
    )


def test_one_wrong_row_is_found_with_its_expert():
    """As if row 4 had gone to its first expert at twice the weight."""
    y_TH = right_answer()
    alone = Case(stage="00", shape=SHAPE.with_(topk=1), tokens=((6,),))
    layer = build_case(groups.single(), alone)
    ids_TK, gates_TK = CASE.routing(0, 0)
    y_TH[4] += layer(CASE.tokens_of(0, 0), ids_TK[:, :1], gates_TK[:, :1])[4]
    row = judged(y_TH)
    assert (row.row, row.expert, row.right) == (4, int(ids_TK[4, 0]), False)
    assert row.ids == ids_TK[4].tolist()
    assert row.error > 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number_is_infinitely_wrong(value):
    y_TH = right_answer()
    y_TH[2, 5] = value
    row = judged(y_TH)
    assert (row.row, row.column, row.right) == (2, 5, False)


def test_a_token_without_experts_must_be_exactly_zero():
    case = Case(stage="00", shape=SHAPE, tokens=((2,),), ids=(([[-1, -1], [-1, -1]],),))
    y_TH = torch.zeros(2, 64)
    assert judged(y_TH, case).right
    y_TH[1, 3] = 1e-30
    row = judged(y_TH, case)
    assert (row.row, row.expert, row.right) == (1, -1, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_error_of_a_row_is_relative_to_its_terms(dtype):
    nan, inf = float("nan"), float("inf")
    rows = [  # y, wanted, terms, error
        ([1.0, 2.5], [1.0, 2.0], 4.0, 0.125),
        ([1.0, 2.0], [1.0, 2.0], 4.0, 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([0.0, 1e-30], [0.0, 0.0], 0.0, inf),
        ([nan, 2.0], [1.0, 2.0], 4.0, inf),
        ([nan, 0.0], [0.0, 0.0], 0.0, inf),
        ([1.0, inf], [1.0, 2.0], 4.0, inf),
    ]
    y_TH, wanted_TH, terms_T, error_T = (
        torch.tensor(values, dtype=dtype) for values in zip(*rows, strict=True)
    )
    assert torch.equal(relative_error(y_TH, wanted_TH, terms_T), error_T)
    assert relative_error(y_TH[:0], wanted_TH[:0], terms_T[:0]).tolist() == []


def test_chosen_rows_include_first_and_last():
    assert chosen_rows(100, 3).tolist() == [0, 50, 99]
    assert chosen_rows(2, 4).tolist() == [0, 1]
    assert chosen_rows(1, 1).tolist() == [0]
    assert chosen_rows(3, None).tolist() == [0, 1, 2]


def test_swapped_rows_are_wrong():
    assert not judged(right_answer()[[1, 0, 2, 3, 4, 5]]).right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tolerance_is_tight(dtype):
    """Right code comes within a factor of four of it, also where a mask leaves tokens a single expert."""
    worst = 0.0
    shapes = (SHAPE, MoEShape(hidden=16, intermediate=24, experts=8, topk=2))
    for seed, shape, kind in itertools.product(range(12), shapes, ("uniform", "masked")):
        how = {"dtype": dtype, "seed": seed, "kind": kind}
        case = Case(stage="00", shape=shape, tokens=((24,),), **how)
        worst = max(worst, run_case(groups.single(), case).worst.error)
    assert tolerance(dtype) / 4 <= worst <= tolerance(dtype)


class _Broken:
    """Stands for a layer; what it does is given."""

    def __init__(self, action):
        self.action = action

    def __call__(self, x_TH, ids_TK, weights_TK, max_tokens=None):
        return self.action(x_TH, ids_TK, weights_TK)


BROKEN = {
    "x was changed": lambda x, ids, w: x.add_(1).clone(),
    "topk_ids was changed": lambda x, ids, w: (ids.zero_(), x.clone())[1],
    "topk_weights was changed": lambda x, ids, w: (w.mul_(2), x.clone())[1],
    "result shares memory with an input": lambda x, ids, w: x,
    "not contiguous": lambda x, ids, w: (x + 0).T.contiguous().T,
    "result is (3, 4) torch.float64": lambda x, ids, w: x.double(),
    "result is (2, 4)": lambda x, ids, w: x[:2].clone(),
}


@pytest.mark.parametrize("words", BROKEN)
def test_broken_promises_are_named(words):
    arguments = (torch.randn(3, 4), torch.ones(3, 2, dtype=torch.int32), torch.ones(3, 2))
    _, _, problems = call_once(_Broken(BROKEN[words]), arguments)
    assert len(problems) == 1
    assert words in problems[0]


def test_reading_fresh_memory_is_wrong():
    arguments = (torch.randn(3, 4), torch.ones(3, 2, dtype=torch.int32), torch.ones(3, 2))
    y_TH, _, _ = call_once(_Broken(lambda x, ids, w: torch.empty_like(x)), arguments)
    assert y_TH.isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "at least one call"),
        ({"tokens": ((1, 2), (1,))}, "one T per rank"),
        ({"placement": "linear"}, "placement='linear'"),
    ],
)
def test_bad_cases_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        Case(**{"stage": "00", "shape": SHAPE, "tokens": ((1,),), **changes})


def test_a_case_takes_a_name_homes_or_a_map():
    def placed(placement):
        return Case(stage="00", shape=SHAPE, tokens=((1, 1),), placement=placement).placed()

    for name, make in NAMED.items():
        assert placed(name) == placed(make(8, 2)) == make(8, 2)
    assert placed((0, 0, 0, 0, 1, 1, 1, 1)).kind == "explicit"
    assert placed((0, 0, 0, 0, 1, 1, 1, (0, 1))).kind == "replicated"


def test_a_case_says_how_many_ranks_it_needs():
    with pytest.raises(InputError, match=r"2 ranks, the group has 1"):
        run_case(groups.single(), Case(stage="00", shape=SHAPE, tokens=((1, 1),)))


# ---- the block around the layer, by hand


def test_block_adds_the_shared_expert_to_its_own_tokens():
    layer = build_case(groups.single(), CASE)
    router = Router(
        weight_EH=torch.randn(8, 64, generator=torch.Generator().manual_seed(1)),
        config=RouterConfig(),
        topk=2,
    )
    shared = CASE.weights_of([0])
    x_TH = CASE.tokens_of(0, 0)
    with_shared, without = MoEBlock(router, layer, shared)(x_TH), MoEBlock(router, layer)(x_TH)
    gate_up = x_TH @ shared.w13_E2IH[0].T
    by_hand = (torch.nn.functional.silu(gate_up[:, :96]) * gate_up[:, 96:]) @ shared.w2_EHI[0].T
    assert torch.allclose(shared_expert(x_TH, shared), by_hand, rtol=1e-5, atol=1e-6)
    assert torch.allclose(with_shared, without + by_hand, rtol=1e-5, atol=1e-5)


def test_the_shared_expert_meets_no_infinity_in_float16():
    """Up is 131072, over fp16's 65504, and a gate of 1/4 makes 18421 of it."""
    w13_12IH, w2_1HI = torch.zeros(1, 4, 4), torch.zeros(1, 4, 2)
    w13_12IH[0, 0, 0], w13_12IH[0, 2, 0], w2_1HI[0, :, 0] = 2**-10, 512, 1 / 16
    x_TH = torch.zeros(1, 4)
    x_TH[0, 0] = 256
    y_TH = shared_expert(x_TH.half(), ExpertWeights(w13_12IH.half(), w2_1HI.half()))
    wanted_TH = shared_expert(x_TH, ExpertWeights(w13_12IH, w2_1HI))
    assert torch.allclose(y_TH, wanted_TH, rtol=2e-3)


def test_block_wants_one_shared_expert():
    layer = build_case(groups.single(), CASE)
    router = Router(weight_EH=torch.zeros(8, 64), config=RouterConfig(), topk=2)
    with pytest.raises(InputError, match="shared holds 2 experts"):
        MoEBlock(router, layer, CASE.weights_of([0, 1]))


def test_sums_run_first_to_last():
    terms = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    assert sum_in_order(terms).item() == 1.0
    assert sum_in_order(terms[::-1]).item() == 0.0
    assert terms[0].item() == 1e8


def test_swiglu_takes_gate_first():
    gate_up = torch.tensor([[0.0, 2.0, 5.0, 3.0]])
    silu_of_2 = 2 / (1 + torch.exp(torch.tensor(-2.0)).item())
    assert swiglu(gate_up).tolist() == [[0.0, pytest.approx(3 * silu_of_2)]]


def test_a_plain_check_finds_a_right_stage_right():
    """With a seed of the command's own draws in which products of a token's only expert cancel."""
    words = ["check", "reference", "--ranks", "4", "--draw", "masked", "--seeds", "2"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert "WRONG" not in done.output
