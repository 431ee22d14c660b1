"""Routers against a restatement in plain Python lists."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epmoe.core.errors import InputError
from epmoe.core.routing import RouterConfig, route, stable_topk


def by_hand(logits: list[float], config: RouterConfig, topk: int, bias: list[float]):
    """One token: ids and weights, with sorted lists and nothing else."""
    if config.scoring == "softmax":
        top = max(logits)
        exps = [math.exp(z - top) for z in logits]
        scores = [e / sum(exps) for e in exps]
    else:
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // config.groups
    members = [range(g * size, (g + 1) * size) for g in range(config.groups)]
    group_score = [sum(sorted((choice[e] for e in m), reverse=True)[:2]) for m in members]
    best = sorted(range(config.groups), key=lambda g: (-group_score[g], g))[: config.topk_groups]
    candidates = [e for g in best for e in members[g]]
    ids = sorted(candidates, key=lambda e: (-choice[e], e))[:topk]
    weights = [scores[e] for e in ids]
    total = sum(weights) if config.renormalize else 1.0
    return ids, [config.scale * w / total for w in weights]


@st.composite
def routers(draw):
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    experts = groups * draw(st.integers(1, 5))
    topk_groups = draw(st.integers(1, groups))
    topk = draw(st.integers(1, experts // groups * topk_groups))
    config = RouterConfig(
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(st.booleans()),
        groups=groups,
        topk_groups=topk_groups,
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return config, experts, topk


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(routers(), st.integers(0, 6), st.booleans(), st.integers(0, 10_000))
def test_any_router_equals_the_restatement(router, tokens, with_bias, seed):
    config, experts, topk = router
    generator = torch.Generator().manual_seed(seed)
    # eighths: far enough apart that float32 and Python's float64 choose alike
    logits_TE = torch.randint(-24, 25, (tokens, experts), generator=generator) / 8
    bias_E = torch.randint(-4, 5, (experts,), generator=generator) / 64 if with_bias else None
    ids_TK, weights_TK = route(logits_TE, config, topk, bias_E)
    assert ids_TK.shape == weights_TK.shape == (tokens, topk)
    assert (ids_TK.dtype, weights_TK.dtype) == (torch.int32, torch.float32)
    bias = bias_E.tolist() if bias_E is not None else [0.0] * experts
    for t in range(tokens):
        ids, weights = by_hand(logits_TE[t].tolist(), config, topk, bias)
        assert sorted(ids_TK[t].tolist()) == sorted(set(ids_TK[t].tolist())), "an expert twice"
        got = dict(zip(ids_TK[t].tolist(), weights_TK[t].tolist(), strict=True))
        assert got == pytest.approx(dict(zip(ids, weights, strict=True)), rel=2e-5)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_5D_one_expert_weighs_exactly_one(tokens, scoring):
    """5D: with K = 1 the weights have shape (T, 1) and are normalised within the token."""
    logits_TE = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1))
    _, weights_TK = route(logits_TE, RouterConfig(scoring=scoring), topk=1)
    assert weights_TK.tolist() == [[1.0]] * tokens


@pytest.mark.parametrize("topk", [1, 3, 5, 6, 7, 10, 65])
def test_5B_any_topk(topk):
    """5B: K that is no power of two, K = E."""
    logits_TE = torch.randn(4, 65, generator=torch.Generator().manual_seed(2))
    ids_TK, weights_TK = route(logits_TE, RouterConfig(), topk)
    assert [len(set(row)) for row in ids_TK.tolist()] == [topk] * 4
    assert weights_TK.sum(dim=1).tolist() == pytest.approx([1.0] * 4, rel=1e-6)


@pytest.mark.parametrize("topk", [0, 5, 2.0, True])
def test_5B_topk_outside_is_refused(topk):
    """5B: K = 0, K = E + 1 and what is no whole number name K and E."""
    with pytest.raises(InputError, match=f"topk={topk}.*experts=4"):
        route(torch.zeros(2, 4), RouterConfig(), topk)


def test_6B_scale_multiplies_once():
    logits_TE = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    _, plain = route(logits_TE, RouterConfig(scoring="sigmoid"), 2)
    _, scaled = route(logits_TE, RouterConfig(scoring="sigmoid", scale=2.5), 2)
    assert torch.equal(scaled, plain * 2.5)


def test_bias_steers_the_choice_and_never_the_weight():
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias_E = torch.tensor([0.0, 0.0, 0.0, 5.0])
    config = RouterConfig(scoring="sigmoid", renormalize=False)
    ids_TK, weights_TK = route(logits_TE, config, 2, bias_E)
    assert ids_TK.tolist() == [[3, 0]]
    assert weights_TK[0].tolist() == pytest.approx([1 / (1 + math.e), 1 / (1 + math.exp(-2))])


def test_closed_groups_are_never_chosen():
    """Group 0 holds the single best expert, group 1 the two best together: the pair decides."""
    logits_TE = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    config = RouterConfig(scoring="sigmoid", groups=2, topk_groups=1)
    assert route(logits_TE, config, 2)[0].tolist() == [[2, 3]]


def test_an_open_group_short_of_finite_experts_gives_others_of_its_own():
    """Masked experts score -inf, as closed groups must not: they would take each other's place."""
    logits_TE = torch.tensor([[0.0, 0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 0.0]])
    bias_E = torch.tensor([-math.inf] * 4 + [0.0, 0.0, -math.inf, -math.inf])
    config = RouterConfig(scoring="sigmoid", groups=2, topk_groups=1)
    ids_TK, weights_TK = route(logits_TE, config, 3, bias_E)
    assert ids_TK.tolist() == [[4, 5, 6]]
    assert weights_TK[0].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_nan_logit_shows_in_all_weights_of_its_token(scoring, renormalize, groups):
    """Wherever it stands: also on an expert that would not be chosen. Other tokens are as without it."""
    config = RouterConfig(scoring=scoring, renormalize=renormalize, groups=groups)
    logits_TE = torch.randn(7, 6, generator=torch.Generator().manual_seed(5))
    whole = route(logits_TE, config, 2)
    logits_TE[:6].fill_diagonal_(math.nan)
    ids_TK, weights_TK = route(logits_TE, config, 2)
    assert weights_TK[:6].isnan().all()
    assert all(len({*row} & {*range(6)}) == 2 for row in ids_TK.tolist())
    assert torch.equal(ids_TK[6], whole[0][6])
    assert torch.equal(weights_TK[6], whole[1][6])


def test_a_nan_bias_shows_in_all_weights():
    bias_E = torch.tensor([0.0, math.nan, 0.0, 0.0])
    _, weights_TK = route(torch.zeros(2, 4), RouterConfig(scoring="sigmoid"), 2, bias_E)
    assert weights_TK.isnan().all()


@pytest.mark.parametrize("groups", [1, 2])
def test_softmax_without_a_bias_orders_by_logits(groups):
    """The probabilities of these experts round to the same number, or to zero."""
    config = RouterConfig(groups=groups, topk_groups=groups)
    near_TE = torch.tensor([[0.0, 1e-9, 2e-9, 3e-9], [0.0, -300.0, -200.0, -150.0]])
    assert route(near_TE, config, 2)[0].tolist() == [[3, 2], [0, 3]]


def test_weights_that_all_underflow_stay_zero():
    """A bias may choose experts whose probability is no number of float32: 0 / 0 would be NaN from finite logits."""
    logits_TE = torch.tensor([[200.0, 0.0, 0.0, 0.0]])
    ids_TK, weights_TK = route(logits_TE, RouterConfig(), 2, torch.tensor([0.0, 5.0, 5.0, 0.0]))
    assert ids_TK.tolist() == [[1, 2]]
    assert weights_TK.tolist() == [[0.0, 0.0]]


def test_ties_go_to_the_lowest_id():
    assert stable_topk(torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0]]), 4).tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize(
    ("config", "experts", "message"),
    [
        ({"scoring": "tanh"}, 4, "scoring='tanh'"),
        ({"groups": 2, "topk_groups": 3}, 4, "topk_groups=3"),
        ({"groups": 3, "topk_groups": 1}, 4, "experts=4 .* groups=3"),
        ({"groups": 4, "topk_groups": 1}, 4, "topk=2 is more than the 1"),
        ({"groups": 2.0}, 4, "groups=2.0: give a whole number"),
        ({"groups": True}, 4, "groups=True: give a whole number"),
        ({"groups": 2, "topk_groups": True}, 4, "topk_groups=True: give a whole number"),
        ({"topk_groups": 0}, 4, "topk_groups=0: give a whole number of at least 1"),
        ({"scale": math.nan}, 4, "scale=nan: give a finite number"),
        ({"scale": math.inf}, 4, "scale=inf: give a finite number"),
        ({"scale": True}, 4, "scale=True: give a finite number"),
        ({"scale": "2.5"}, 4, "scale='2.5': give a finite number"),
    ],
)
def test_bad_configurations_are_named(config, experts, message):
    with pytest.raises(InputError, match=message):
        RouterConfig(**config).check(experts, 2)


def test_half_precision_logits_are_scored_in_float32():
    logits_TE = torch.randn(5, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids, weights = route(logits_TE, RouterConfig(), 3)
    wide_ids, wide_weights = route(logits_TE.float(), RouterConfig(), 3)
    assert torch.equal(ids, wide_ids)
    assert torch.equal(weights, wide_weights)


def test_logits_must_be_a_matrix():
    with pytest.raises(InputError, match=r"\(4,\)"):
        route(torch.zeros(4), RouterConfig(), 1)
