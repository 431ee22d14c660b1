"""The router kernel and the router in plain torch follow one rule, also where logits are not what they should be."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: @triton.jit looks at it

from epmoe.core import groups
from epmoe.core.errors import InputError
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.routing import RouterConfig, route
from epmoe.core.shape import MoEShape
from epmoe.core.weights import random_weights
from epmoe.fused_triton import kernels as kn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def both(logits, config, topk, bias_E=None):
    """(ids, weights) of the torch router, then of the kernel, on the CPU."""
    bias = None if bias_E is None else bias_E.to(DEVICE)
    got = kn.route_tokens(logits.to(DEVICE), topk, config, bias)
    return route(logits, config, topk, bias_E), tuple(part.cpu() for part in got)


@st.composite
def routings(draw):
    """A config, K, logits and a bias or None; any entry may be -inf, as a masked expert's is.

    Quarters from 1/4 on tie often, but no two pairs of scores add up to nearly the same: sums that differ in their last
    bit may order either way. (With both signs sigmoid(z) + sigmoid(-z) is 1 for every z.)
    """
    count, size = draw(st.sampled_from([1, 1, 2, 3, 5])), draw(st.integers(1, 5))
    topk_groups = draw(st.integers(1, count))
    topk = draw(st.integers(1, size * topk_groups))
    config = RouterConfig(
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(st.booleans()),
        groups=count,
        topk_groups=topk_groups,
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    masked = draw(st.sampled_from([0.0, 0.3, 0.8]))

    def quarters(rows, least, most):
        drawn = torch.randint(least, most, (rows, count * size), generator=generator) / 4
        gone = torch.rand(drawn.shape, generator=generator) < masked
        return drawn.masked_fill(gone, -math.inf)

    bias_E = quarters(1, -8, 9)[0] if draw(st.booleans()) else None
    return quarters(2, 1, 25), config, topk, bias_E


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(routings())
def test_kernel_and_torch_choose_and_weigh_alike(routing):
    (want_ids, want_weights), (ids, weights) = both(*routing)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True], ids=["", "renormalized"])
@pytest.mark.parametrize("count", [1, 3], ids=["", "groups"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_nan_logit_shows_in_all_weights_of_its_token(scoring, renormalize, count, bias):
    """A broken gate must not look like a plausible routing, on whichever expert the NaN stands. The last is whole."""
    config = RouterConfig(scoring=scoring, renormalize=renormalize, groups=count)
    logits = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
    logits[:6].fill_diagonal_(math.nan)
    logits[6] = math.nan
    bias_E = torch.tensor([0.5, -math.inf, 9.0, 0.0, -9.0, -math.inf]) if bias else None
    (want_ids, want_weights), (ids, weights) = both(logits, config, 2, bias_E)
    assert weights[:7].isnan().all()
    assert want_weights[:7].isnan().all()
    assert all(len({*row} & {*range(6)}) == 2 for row in ids.tolist())
    assert torch.equal(ids[7], want_ids[7])
    torch.testing.assert_close(weights[7], want_weights[7])


def test_a_nan_bias_shows_in_all_weights():
    bias_E = torch.tensor([0.0, math.nan, 0.0, 0.0])
    for part in both(torch.zeros(2, 4), RouterConfig(scoring="sigmoid"), 2, bias_E):
        assert part[1].isnan().all()


NEAR_TIE = torch.tensor([[0.0, 1e-9, 2e-9, 3e-9], [0.0, -300.0, -200.0, -150.0]])


@pytest.mark.parametrize("count", [1, 2])
def test_softmax_without_a_bias_orders_by_logits(count):
    """The probabilities of these experts round to the same number, or to zero."""
    config = RouterConfig(groups=count, topk_groups=count)
    for part in both(NEAR_TIE, config, 2):
        assert part[0].tolist() == [[3, 2], [0, 3]]


def test_weights_that_all_underflow_stay_zero():
    logits, bias_E = torch.tensor([[200.0, 0.0, 0.0, 0.0]]), torch.tensor([0.0, 5.0, 5.0, 0.0])
    for ids, weights in both(logits, RouterConfig(), 2, bias_E):
        assert ids.tolist() == [[1, 2]]
        assert weights.tolist() == [[0.0, 0.0]]


def layer_of(shape, **options):
    weights = random_weights(shape, range(shape.experts)).to(DEVICE)
    placement = contiguous(shape.experts, 1)
    group = groups.single(DEVICE)
    return build("fused_triton", shape, weights, placement, group, 8, **options)


WAYS = [{}, {"check": True}, {"lost": "renormalise"}, {"without": "router"}, {"without": "pack"}]


@pytest.mark.parametrize("options", WAYS, ids=lambda o: "-".join(map(str, o.values())) or "fused")
@pytest.mark.parametrize("max_tokens", [None, 2])
def test_a_broken_gate_shows_on_every_way_through_the_layer(options, max_tokens):
    """Options decide whether the pack kernel routes; none of them may decide whether a NaN logit is seen."""
    layer = layer_of(MoEShape(hidden=8, intermediate=6, experts=4, topk=2), **options)
    generator = torch.Generator().manual_seed(1)
    x, logits = torch.randn(2, 8, generator=generator), torch.randn(2, 4, generator=generator)
    logits[0, 1] = math.nan
    y = layer.from_logits(x.to(DEVICE), logits.to(DEVICE), max_tokens=max_tokens)
    layer.close()
    assert y.isnan().any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_logits_of_any_float_dtype_are_taken_on_every_way(dtype):
    shape = MoEShape(hidden=8, intermediate=6, experts=4, topk=2)
    generator = torch.Generator().manual_seed(2)
    x, logits = torch.randn(3, 8, generator=generator), torch.randn(3, 4, generator=generator)
    x, logits = x.to(DEVICE), logits.to(DEVICE, dtype)
    fused, apart = layer_of(shape), layer_of(shape, without="router")
    got, want = fused.from_logits(x, logits), apart.from_logits(x, logits)
    fused.close()
    apart.close()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("experts", [1023, 1024])
def test_a_layer_routes_to_as_many_experts_as_it_says(experts):
    layer = layer_of(MoEShape(hidden=4, intermediate=2, experts=experts, topk=3))
    generator = torch.Generator().manual_seed(experts)
    x, logits = torch.randn(2, 4, generator=generator), torch.randn(2, experts, generator=generator)
    logits[0, experts - 1] = 9.0  # the last id
    ids, weights = route(logits, RouterConfig(), 3)
    assert ids[0, 0] == experts - 1
    x = x.to(DEVICE)
    got, want = (
        layer.from_logits(x, logits.to(DEVICE)),
        layer(x, ids.to(DEVICE), weights.to(DEVICE)),
    )
    layer.close()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("experts", "topk", "message"),
    [(1025, 3, "experts=1025.*1024"), (64, 33, "topk=33.*32")],
)
def test_a_layer_beyond_its_router_is_refused_when_it_is_built(experts, topk, message):
    with pytest.raises(InputError, match=message):
        layer_of(MoEShape(hidden=4, intermediate=2, experts=experts, topk=topk))


@pytest.mark.parametrize(("experts", "topk"), [(4097, 2), (64, 33)])
def test_sizes_beyond_the_kernel_are_refused(experts, topk):
    with pytest.raises(InputError, match=f"{experts}|{topk}"):
        kn.route_tokens(torch.zeros(1, experts, device=DEVICE), topk, RouterConfig())
