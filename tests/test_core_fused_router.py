"""Who routes: which layers do it inside their exchange, and what a measurement says of those and of the others."""

from typing import Any

import pytest
import torch

from epmoe.core import groups
from epmoe.core.bench.run import Config, _base, with_draws
from epmoe.core.bench.subjects import StageSubject
from epmoe.core.errors import InputError
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.routing_stats import RoutingCounter
from epmoe.core.shape import MoEShape
from epmoe.core.split import RoutingExchange, SplitLayer
from epmoe.core.weights import random_weights

SHAPE = MoEShape(hidden=8, intermediate=6, experts=4, topk=2)
WEIGHTS = random_weights(SHAPE, range(4))


def layer_of(stage: str, **more) -> SplitLayer:
    layer = build(stage, SHAPE, WEIGHTS, contiguous(4, 1), groups.single(), 4, **more)
    assert isinstance(layer, SplitLayer)
    return layer


@pytest.mark.parametrize(
    ("name", "more", "fuses"),
    [
        ("reference", {}, False),
        ("fixed_capacity", {}, False),
        ("fused_triton", {}, True),
        ("fused_capacity+loop", {"without": "merge"}, True),
        ("fused_capacity+loop", {"without": "router"}, False),
        ("fused_capacity+loop", {"without": "pack"}, False),
        ("fused_capacity+loop", {"check": True}, False),
        ("fused_capacity+loop", {"lost": "renormalise"}, False),
    ],
)
def test_who_routes_inside_the_exchange(monkeypatch, name, more, fuses):
    """What a layer says of itself is what its calls do."""
    layer, seen = layer_of(name, **more), []
    assert layer.fuses_router is fuses
    if isinstance(layer.exchange, RoutingExchange):
        inside = layer.exchange.route_and_dispatch
        spied = lambda *args: seen.append(True) or inside(*args)  # noqa: E731
        monkeypatch.setattr(layer.exchange, "route_and_dispatch", spied)
    layer.from_logits(torch.ones(3, 8), torch.randn(3, 4), max_tokens=3)
    assert bool(seen) is fuses


@pytest.mark.parametrize(
    ("subject", "router"),
    [
        ("02", "torch"),
        ("03", "the layer's own"),
        ("03:-merge", "the layer's own"),
        ("03:-router", "torch operators of its own"),
        ("03:-pack", "torch operators of its own"),
    ],
)
def test_a_measurement_says_who_routed(monkeypatch, subject, router):
    """A layer whose fused router is switched off is given logits still: only so is the fusion what differs."""
    config = Config(shape="tiny", ep=1, loopback=False, tokens=(3,), draws=1, layers=1)
    setting = with_draws(_base(groups.single("cpu"), config), config, 3, 0, 1)
    one, given = StageSubject(subject, setting), []
    truth = type(one.layers[0]).from_logits
    monkeypatch.setattr(
        type(one.layers[0]),
        "from_logits",
        lambda self, *args, **how: given.append(args) or truth(self, *args, **how),
    )
    one.call(0, 0)
    assert one.describe()["router"] == router
    assert len(given) == (router != "torch")
    one.close()


# ---- what a warm-up runs


def warmed(
    group, names: tuple[tuple[int, ...], ...]
) -> tuple[list[tuple[str, int, int]], list[int]]:
    """What a warm-up calls when this rank's experts name `names[rank]`: (by what, T, capacity); and what is counted."""
    placed = contiguous(4, group.size)
    weights = random_weights(SHAPE, placed.experts_of(group.rank))
    calls = []
    layer: Any = build("fused_capacity+loop", SHAPE, weights, placed, group, 4)
    layer.experts.warmup_capacities = lambda: names[group.rank]
    exchange = layer.exchange
    dispatch, route_and_dispatch = exchange.dispatch, exchange.route_and_dispatch

    def with_ids(x_TH, ids_TK, weights_TK, capacity):
        calls.append(("ids", len(x_TH), capacity))
        return dispatch(x_TH, ids_TK, weights_TK, capacity)

    def with_logits(x_TH, logits_TE, bias_E, ids_TK, weights_TK, capacity):
        calls.append(("logits" if bias_E is None else "bias", len(x_TH), capacity))
        return route_and_dispatch(x_TH, logits_TE, bias_E, ids_TK, weights_TK, capacity)

    exchange.dispatch, exchange.route_and_dispatch = with_ids, with_logits
    layer.counter = counter = RoutingCounter(layer.spec.tables)
    layer.warmup()
    assert layer.counter is counter
    counted = list(counter.read(group).tokens)
    layer.close()
    return calls, counted


def test_a_warm_up_runs_every_kernel_and_counts_nothing(pool):
    """Ranks whose experts name other capacities run all of them: alone, one would wait for the other for ever."""
    everything = [(by, c, c) for c in (1, 2, 3, 4) for by in ("ids", "logits", "bias")]
    for calls, counted in pool.run(warmed, ((2,), (3, 2)), ranks=2):
        assert calls == everything
        assert counted == [0, 0]


def test_a_warm_up_that_fails_gives_the_counter_back():
    layer = layer_of("fixed_capacity")
    layer.counter = counter = RoutingCounter(layer.spec.tables)
    layer.close()
    with pytest.raises(InputError, match="closed"):
        layer.warmup()
    assert layer.counter is counter
