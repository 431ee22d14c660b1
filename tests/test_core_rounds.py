"""Rounds: as many, and as large, on every rank; and who is asked for what."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epmoe.core import ambient
from epmoe.core.cases import Case
from epmoe.core.conformance.program import caught
from epmoe.core.errors import CapacityError
from epmoe.core.groups import EPGroup
from epmoe.core.rounds import Rounds, plan_rounds
from epmoe.core.shape import MoEShape
from epmoe.core.verify import bring, build_case, tolerance

SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)


def spec(limit: int, everyone: list[int], overflow: str = "rounds") -> SimpleNamespace:
    """All that planning looks at. `asked` counts the exchanges over the control plane."""
    group = SimpleNamespace(size=len(everyone), asked=0)

    def all_gather_ints(values):
        group.asked += 1
        assert values[0] in everyone
        return [[tokens] for tokens in everyone]

    group.all_gather_ints = all_gather_ints
    return SimpleNamespace(max_tokens_per_rank=limit, overflow=overflow, group=group)


@pytest.mark.parametrize(
    ("limit", "everyone", "count", "capacity"),
    [
        pytest.param(16, [26, 3], 2, 16, id="9D-C16-T26"),
        pytest.param(128, [130, 128], 2, 128, id="9D-C128-T130"),
        pytest.param(64, [26, 3], 1, 26, id="9D-C_over_T"),
        pytest.param(1, [3, 0, 2], 3, 1, id="9D-C1"),
        pytest.param(8, [3, 1], 1, 3, id="9B-T3-C8"),
        pytest.param(16384, [3, 1], 1, 3, id="9B-C16384"),
        pytest.param(8, [0, 0], 1, 1, id="nobody"),
        pytest.param(16, [32, 0], 2, 16, id="no_rest"),
        pytest.param(512, [8192, 8192], 16, 512, id="prefill"),
    ],
)
def test_all_ranks_plan_the_same(limit, everyone, count, capacity):
    """Asked, declared or alone: `count` rounds of `capacity` tokens; declaring asks nobody."""
    for tokens in everyone:
        asked = spec(limit, everyone)
        assert plan_rounds(asked, tokens, None, False) == Rounds(count, capacity)
        assert asked.group.asked == 1
        declared = spec(limit, everyone)
        assert plan_rounds(declared, tokens, max(everyone), False) == Rounds(count, capacity)
        assert declared.group.asked == 0
    alone = spec(limit, everyone[:1])
    assert plan_rounds(alone, everyone[0], None, False) == Rounds(count, capacity)
    assert alone.group.asked == 0


@pytest.mark.parametrize("tokens", [17, 3])
def test_strict_layers_raise_on_the_rank_that_has_room_too(tokens):
    """Asked, or declared: every rank says the same; at C tokens nobody complains."""
    strict = spec(16, [17, 3], overflow="raise")
    for declared in (None, 17):
        with pytest.raises(CapacityError, match=r"17 tokens on a rank, .* max_tokens_per_rank=16"):
            plan_rounds(strict, tokens, declared, False)
    assert strict.group.asked == 1
    assert plan_rounds(spec(16, [16, 3], overflow="raise"), 3, None, False) == Rounds(1, 16)


def test_captures_ask_nobody():
    """Without a declared number they run one round of the full size, which all ranks know."""
    captured = spec(16, [5, 3])
    assert plan_rounds(captured, 5, None, True) == Rounds(1, 16)
    assert plan_rounds(captured, 5, 6, True) == Rounds(1, 6)
    assert captured.group.asked == 0


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 20), st.lists(st.integers(0, 90), min_size=1, max_size=5))
def test_slices_are_the_tokens_in_order(limit, everyone):
    """Every rank's slices give its tokens back, none too long, and no round is for nobody unless there is one."""
    plans = {plan_rounds(spec(limit, everyone), tokens, None, False) for tokens in everyone}
    assert len(plans) == 1
    plan = plans.pop()
    assert plan.capacity <= limit
    rounds = [0] * plan.count
    for tokens in everyone:
        parts = [list(range(tokens))[part] for part in plan.slices()]
        assert len(parts) == plan.count
        assert [token for part in parts for token in part] == list(range(tokens))
        assert max(map(len, parts)) <= plan.capacity
        rounds = [most + len(part) for most, part in zip(rounds, parts, strict=True)]
    assert plan.count == 1 or min(rounds) > 0


# ---- on a layer


def exchanges(group: EPGroup, case: Case, captured: bool) -> tuple[int, str]:
    """How often this rank communicated in one call, data and control plane; and what the call said."""
    layer = build_case(group, case)
    arguments, truth = bring(group, case, 0), ambient.capturing
    before = group.operations
    ambient.capturing = lambda device: captured
    try:
        said = caught(lambda: layer(*arguments, max_tokens=case.max_tokens(0)))
    finally:
        ambient.capturing = truth
    after = group.operations
    layer.close()
    return after - before, said


def test_a_captured_call_asks_nobody(pool):
    """Two exchanges, and one question where nothing is declared; none of it in a capture."""

    def count(captured: bool, declared: bool) -> list[tuple[int, str]]:
        tokens = ((5, 2),)
        case = Case(stage="02", shape=SHAPE, tokens=tokens, capacity=8, declared=declared)
        return pool.run(exchanges, case, captured, ranks=2)

    assert count(captured=False, declared=False) == [(3, "")] * 2
    assert count(captured=False, declared=True) == [(2, "")] * 2
    assert count(captured=True, declared=False) == [(2, "")] * 2


@pytest.mark.parametrize("overflow", ["rounds", "raise"])
def test_a_capture_holds_one_round(pool, overflow):
    """More than C tokens in a capture: where the number is declared all ranks refuse it, before any exchange."""
    case = Case(
        stage="02", shape=SHAPE, tokens=((9, 2),), capacity=8, overflow=overflow, declared=True
    )
    for count, said in pool.run(exchanges, case, True, ranks=2):
        assert count == 0
        assert said.startswith("CapacityError: 9 tokens in a CUDA graph capture")
        assert "max_tokens_per_rank=8" in said


def apart_in_rounds(group: EPGroup, case: Case, limits: tuple[int, ...]) -> list[float]:
    """How far, relative to its largest value, the result of one large layer is from those of smaller ones."""
    arguments, results = bring(group, case, 0), []
    for limit in limits:
        layer = build_case(group, replace(case, capacity=limit))
        results.append(layer(*arguments))
        layer.close()
    return [float((results[0] - y).abs().max() / results[0].abs().max()) for y in results[1:]]


@pytest.mark.parametrize("name", ["00", "01", "02"])
@pytest.mark.parametrize("tokens", [(26, 3), (26, 26)], ids=str)
def test_9D_rounds_equal_one_large_call(pool, name, tokens):
    """9D: C = 16, 7 and 1 against one call. The libraries' products of fewer rows may round otherwise, no more."""
    case = Case(stage=name, shape=SHAPE, tokens=(tokens,), overflow="rounds")
    for found in pool.run(apart_in_rounds, case, (26, 16, 7, 1), ranks=2):
        assert max(found) <= tolerance(torch.float32), found
