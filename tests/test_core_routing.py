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


@pytest.mark.parametrize("topk", [0, 5])
def test_5B_topk_outside_is_refused(topk):
    """5B: K = 0 and K = E + 1 name K and E."""
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


def test_ties_go_to_the_lowest_id():
    assert stable_topk(torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0]]), 4).tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize(
    ("config", "experts", "message"),
    [
        ({"scoring": "tanh"}, 4, "scoring='tanh'"),
        ({"groups": 2, "topk_groups": 3}, 4, "topk_groups=3"),
        ({"groups": 3, "topk_groups": 1}, 4, "experts=4 .* groups=3"),
        ({"groups": 4, "topk_groups": 1}, 4, "topk=2 is more than the 1"),
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
