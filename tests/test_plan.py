"""The limit calculator against numbers worked by hand, and against properties that any routing has."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan_examples import SLOW, TOY, TOY_DRAW

from epmoe.core.bench.floors import limits
from epmoe.core.errors import InputError
from epmoe.core.placement import contiguous, explicit, round_robin
from epmoe.core.plan import (
    SCHEMES,
    Plan,
    drawn_load,
    expected_active,
    expected_load,
    expert_bytes,
    floor,
    hit_probability,
    plan,
    wire_bytes,
)
from epmoe.core.plan.gpus import GPUS, custom_gpu, named_gpu
from epmoe.core.shape import MoEShape, named_shape

HALF: Any = 0.5  # of what has to be whole
GLM = named_shape("glm-5.3-flash")  # H 4096, I 2048, E 288, K 8


def uniform_draw(shape: MoEShape, tokens: int, seed: int) -> torch.Tensor:
    scores_TE = torch.rand(tokens, shape.experts, generator=torch.Generator().manual_seed(seed))
    return scores_TE.topk(shape.topk, dim=1).indices


# ---- active experts


def test_toy_draw_counted_by_hand():
    load = drawn_load(TOY, TOY_DRAW)
    assert load.active == (2, 2)
    assert load.assignments == (4, 4)
    assert load.slots_SD == ((3, 1), (1, 3))
    assert load.hits_SD == ((2, 1), (1, 2))
    assert load.exact


def test_masked_and_repeated_ids():
    ids_TK = torch.tensor([[-1, -1], [3, -1], [3, 3]], dtype=torch.int32)
    load = drawn_load(TOY, [ids_TK, ids_TK[:0]])
    assert load.active == (0, 1)
    assert load.slots_SD == ((0, 3), (0, 0))
    assert load.hits_SD == ((0, 2), (0, 0))


@pytest.mark.parametrize(("tokens", "active"), [(1, 7.673), (8, 42.770), (128, 72.000)])
def test_expected_active_experts_of_the_shape_of_record(tokens, active):
    assert expected_active(GLM, 4, tokens) == pytest.approx((active,) * 4, abs=1e-3)


def test_a_rank_without_experts_or_without_tokens():
    assert expected_active(MoEShape(hidden=4, intermediate=2, experts=3, topk=1), 4, 5)[3] == 0
    assert expected_active(TOY, 2, 0) == (0, 0)
    nobody = torch.empty(0, 2, dtype=torch.int64)
    assert drawn_load(TOY, [nobody, nobody]).active == (0, 0)


def test_hit_probability_by_hand():
    assert hit_probability(TOY, 2) == pytest.approx(1 - 1 / 6)
    assert hit_probability(TOY, 0) == 0
    assert hit_probability(TOY, 4) == 1


@pytest.mark.parametrize("place", [contiguous, round_robin])
def test_draws_average_to_the_expectation(place):
    shape = MoEShape(hidden=8, intermediate=8, experts=10, topk=3)
    placement = place(10, 4)
    draws = 400
    loads = [
        drawn_load(shape, uniform_draw(shape, 8, seed).split(2), placement) for seed in range(draws)
    ]
    expected = expected_load(shape, 4, 2, placement)
    for rank in range(4):
        seen = torch.tensor([load.active[rank] for load in loads], dtype=torch.float64)
        error = seen.std().item() / math.sqrt(draws)
        assert abs(seen.mean().item() - expected.active[rank]) < 4 * error + 1e-9
        hits = torch.tensor([load.hits_SD[0][rank] for load in loads], dtype=torch.float64)
        error = hits.std().item() / math.sqrt(draws)
        assert abs(hits.mean().item() - expected.hits_SD[0][rank]) < 4 * error + 1e-9


# ---- the floor


def test_toy_floor_by_hand():
    # an expert is 3 x 4 x 2 x 2 bytes = 48; a row in and a row out are 2 x 8 bytes; 48 operations an assignment
    one = floor(TOY, SLOW, active_experts=2, assignments=4, hit_tokens=3)
    assert expert_bytes(TOY) == 48
    assert (one.weight_bytes, one.activation_bytes, one.flop) == (96, 48, 192)
    assert one.weight_seconds == pytest.approx(0.96)
    assert one.activation_seconds == pytest.approx(0.48)
    assert one.compute_seconds == pytest.approx(0.192)
    assert one.seconds == pytest.approx(1.44)
    assert one.bound == "memory"


def test_toy_floor_turns_compute_bound():
    one = floor(TOY, SLOW, active_experts=1, assignments=40, hit_tokens=0)
    assert one.compute_seconds == pytest.approx(1.92)
    assert (one.seconds, one.bound) == (one.compute_seconds, "compute")


@pytest.mark.parametrize(
    ("active", "microseconds"), [(6, 68.6), (17, 194.5), (38, 434.7), (71, 812.2), (72, 823.6)]
)
def test_weight_floors_of_the_shape_of_record(active, microseconds):
    one = floor(GLM, named_gpu("h200"), active_experts=active, assignments=active, hit_tokens=0)
    assert expert_bytes(GLM) == 50_331_648
    assert one.weight_seconds * 1e6 == pytest.approx(microseconds, abs=0.05)
    assert one.bandwidth == 4.4e12


def test_prefill_turns_compute_bound_between_2048_and_4096():
    at = {tokens: plan(GLM, 4, tokens).slowest.floor for tokens in (128, 2048, 4096)}
    assert at[2048].flop == 2 * 16384 * 3 * 4096 * 2048
    assert at[2048].compute_seconds * 1e6 == pytest.approx(833.5, abs=0.1)
    assert [at[tokens].bound for tokens in at] == ["memory", "memory", "compute"]


def test_float8_halves_weights_and_compute():
    wide, narrow = (
        plan(GLM, 4, 128, dtype=dtype).slowest.floor for dtype in ("bfloat16", "float8")
    )
    assert narrow.weight_bytes * 2 == wide.weight_bytes
    assert narrow.activation_bytes == wide.activation_bytes * 3 / 4
    assert narrow.compute_seconds == pytest.approx(wide.compute_seconds / 2, rel=1e-3)


# ---- properties of any routing

SHAPES_AND_RANKS = st.integers(1, 12).flatmap(
    lambda experts: st.tuples(st.just(experts), st.integers(1, experts), st.integers(1, 5))
)


@settings(deadline=None, max_examples=60)
@given(SHAPES_AND_RANKS, st.lists(st.integers(0, 6), min_size=5, max_size=5), st.integers(0, 99))
def test_any_draw_adds_up(sizes, lengths, seed):
    experts, topk, ranks = sizes
    shape = MoEShape(hidden=4, intermediate=2, experts=experts, topk=topk)
    tokens = lengths[:ranks]
    ids_TK = uniform_draw(shape, sum(tokens), seed)
    load = drawn_load(shape, ids_TK.split(tokens), contiguous(experts, ranks))
    assert sum(load.active) == ids_TK.unique().numel()
    assert sum(load.assignments) == ids_TK.numel()
    wires = {name: wire_bytes(name, shape, load) for name in SCHEMES}
    needed = wires["dedup"].rows_sent
    assert all(wire.rows_sent >= wire.rows_needed == needed for wire in wires.values())
    assert wires["all_gather"].rows_sent == wires["fixed_capacity"].rows_sent
    for rank, active in enumerate(load.active):
        assert active <= min(load.assignments[rank], shape.experts)
        assert load.hit_tokens[rank] <= min(load.assignments[rank], sum(tokens))


@settings(deadline=None, max_examples=60)
@given(SHAPES_AND_RANKS, st.integers(0, 50))
def test_the_expectation_grows_with_tokens(sizes, tokens):
    experts, topk, ranks = sizes
    shape = MoEShape(hidden=4, intermediate=2, experts=experts, topk=topk)
    less, more = plan(shape, ranks, tokens, SLOW), plan(shape, ranks, tokens + 1, SLOW)
    assert sum(rank.assignments for rank in more.ranks) == pytest.approx(
        (tokens + 1) * ranks * topk
    )
    assert more.floor_seconds >= less.floor_seconds
    for small, large in zip(less.ranks, more.ranks, strict=True):
        assert small.active_experts <= large.active_experts <= large.local_experts
    for small, large in zip(less.wires, more.wires, strict=True):
        assert small.rows_sent <= large.rows_sent


# ---- plans


def test_a_plan_of_a_draw_takes_one_tensor_or_one_per_rank():
    one = plan(TOY, 2, 2, SLOW, torch.cat(TOY_DRAW))
    assert one == plan(TOY, 2, (2, 2), SLOW, TOY_DRAW)
    assert one.exact
    assert one.floor_seconds == pytest.approx((2 * 48 + 3 * 16) / 100)


def test_json_there_and_back():
    one = plan(GLM, 4, (1, 2, 3, 0), placement=round_robin(288, 4))
    assert Plan.from_json(one.to_json()) == one
    assert json.loads(one.to_json())["shape"]["experts"] == 288


def test_the_slowest_rank_sets_the_floor():
    everything_on_rank_1 = explicit([1, 1, 1, 1], 2)
    one = plan(TOY, 2, 4, SLOW, placement=everything_on_rank_1)
    assert one.slowest.rank == 1
    assert one.ranks[0].floor.seconds == 0
    assert one.ranks[1].resident_bytes == 4 * 48


def test_datasheet_bandwidth_where_nobody_measured():
    assert plan(GLM, 4, 1, "H100").slowest.floor.bandwidth == 3.35e12
    assert "datasheet" in plan(GLM, 4, 1, "h100").bandwidth_source
    assert "measured" in plan(GLM, 4, 1, "h200").bandwidth_source
    assert all(0.5 < gpu.streaming_bandwidth / gpu.memory_bandwidth <= 1 for gpu in GPUS.values())


# ---- bad input

BAD_CALLS = {
    "unknown GPU": (lambda: plan(TOY, 2, 1, "h999"), "h999"),
    "unknown scheme": (lambda: wire_bytes("carrier", TOY, expected_load(TOY, 2, 1)), "carrier"),
    "unknown scheme of a plan": (lambda: plan(TOY, 2, 1, SLOW).wire("carrier"), "carrier"),
    "unknown dtype": (lambda: plan(TOY, 2, 1, SLOW, dtype="int3"), "int3"),
    "no 8-bit peak": (lambda: plan(TOY, 2, 1, SLOW, dtype="float8"), "float8"),
    "no ranks": (lambda: plan(TOY, 0, 1, SLOW), "ep=0"),
    "half a rank": (lambda: plan(TOY, HALF, 1, SLOW), "ep=0.5"),
    "negative tokens": (lambda: plan(TOY, 2, -1, SLOW), "-1"),
    "half a token": (lambda: plan(TOY, 2, HALF, SLOW), "tokens[0]=0.5"),
    "True tokens": (lambda: plan(TOY, 2, (1, True), SLOW), "tokens[1]=True"),
    "tokens of too few ranks": (lambda: plan(TOY, 3, (1, 2), SLOW), "ep=3"),
    "placement of another EP": (lambda: plan(TOY, 2, 1, SLOW, placement=contiguous(4, 3)), "ep=2"),
    "capacity below T": (lambda: plan(TOY, 2, 5, SLOW, capacity=4), "capacity=4"),
    "half of a capacity": (lambda: plan(TOY, 2, 5, SLOW, capacity=HALF), "capacity=0.5"),
    "id too large": (lambda: drawn_load(TOY, [torch.tensor([[4, 0]])] * 2), "hold 4"),
    "id below -1": (lambda: drawn_load(TOY, [torch.tensor([[-2, 0]])] * 2), "hold -2"),
    "ids in float": (lambda: drawn_load(TOY, [torch.ones(1, 2)] * 2), "float32"),
    "wrong K": (lambda: drawn_load(TOY, [torch.tensor([[1]])] * 2), "topk=2"),
    "draw of another length": (lambda: plan(TOY, 2, 3, SLOW, TOY_DRAW), "[2, 2]"),
    "flat draw of another length": (lambda: plan(TOY, 2, 3, SLOW, torch.cat(TOY_DRAW)), "6 tokens"),
    "too many local experts": (lambda: hit_probability(TOY, 5), "local_experts=5"),
    "fewer assignments than active": (
        lambda: floor(TOY, SLOW, active_experts=3, assignments=2, hit_tokens=1),
        "assignments=2",
    ),
    "not a number": (
        lambda: floor(TOY, SLOW, active_experts=math.nan, assignments=2, hit_tokens=1),
        "active_experts=nan",
    ),
    "figures that are none": (lambda: named_gpu("custom:fast"), "custom:4.8,990,450"),
    "two figures": (lambda: named_gpu("custom:4.8,990"), "custom:4.8,990,450"),
    "a GPU that nobody knows": (lambda: named_gpu("a100"), "custom:4.8,990,450"),
    "no bandwidth": (lambda: custom_gpu(0, 1, 1), "memory_bandwidth=0"),
    "measured by nobody": (lambda: replace(SLOW, measured_bandwidth=1), "measured_source"),
    "not a plan": (lambda: Plan.from_json("{}"), "no plan"),
    "not JSON": (lambda: Plan.from_json("nonsense"), "no plan"),
}


def test_a_gpu_by_its_figures_serves_wherever_one_is_named():
    found = named_gpu("custom:4.8,990,450")
    assert found == custom_gpu(4.8e12, 990e12, 450e9)
    assert plan(TOY, 2, 1, "custom:4.8,990,450").ranks == plan(TOY, 2, 1, found).ranks
    assert limits("custom:4.8,990,450", "bfloat16")["floor_bytes_per_second"] == 4.8e12


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named(name):
    call, words = BAD_CALLS[name]
    with pytest.raises(InputError) as caught:
        call()
    assert words in str(caught.value)
