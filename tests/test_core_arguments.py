"""Arguments that are no arguments: the same words on every rank, whichever way a layer takes inside."""

import re
from typing import Any

import pytest
import torch

from epmoe.core import groups
from epmoe.core.errors import InputError
from epmoe.core.launch import launch
from epmoe.core.layer import build
from epmoe.core.loopback import LoopbackGroup
from epmoe.core.placement import contiguous
from epmoe.core.routing import route
from epmoe.core.shape import MoEShape
from epmoe.core.weights import ExpertWeights, random_weights

SHAPE = MoEShape(hidden=8, intermediate=6, experts=4, topk=2)
X_TH = torch.ones(5, 8)


def layer_of(group=None, stage="02", **more) -> Any:
    group = group or groups.single()
    placement = contiguous(4, group.size)
    weights = random_weights(SHAPE, placement.experts_of(group.rank))
    return build(stage, SHAPE, weights, placement, group, 8, **more)


LOGITS = {
    "too wide": ((torch.zeros(5, 6),), r"logits has shape \(5, 6\): expected \[T, E\] = \(5, 4\)"),
    "too narrow": ((torch.zeros(5, 3),), r"expected \[T, E\] = \(5, 4\)"),
    "other tokens": ((torch.zeros(4, 4),), r"expected \[T, E\] = \(5, 4\)"),
    "whole numbers": ((torch.zeros(5, 4, dtype=torch.int32),), "expected a float dtype"),
    "a list": (([[0.0] * 4] * 5,), "logits is a list: give a tensor"),
    "a bias of one": (
        (torch.zeros(5, 4), torch.zeros(1)),
        r"bias has shape \(1,\): expected \[E\]",
    ),
    "a bias per token": ((torch.zeros(5, 4), torch.zeros(5, 4)), r"expected \[E\] = \(4,\)"),
}


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("layered", ["02", "fused_capacity+loop"])
def test_logits_and_bias_have_to_fit(layered, check, name):
    """Too few columns would route among some experts only; a broadcast bias would steer all alike."""
    given, words = LOGITS[name]
    layer = layer_of(stage=layered, check=check)
    with pytest.raises(InputError, match=words):
        layer.from_logits(X_TH, *given, max_tokens=5)


@pytest.mark.parametrize("layered", ["02", "fused_capacity+loop"])
@pytest.mark.parametrize("kind", ["float64", "transposed", "a bias of 16 bits"])
def test_logits_of_any_float_kind_are_routed_alike(layered, kind):
    """Fused into the exchange or not: what `route` takes, a layer takes."""
    logits_TE = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    bias_E = torch.arange(4.0) if kind == "a bias of 16 bits" else None
    layer = layer_of(stage=layered)
    wanted_TH = layer(X_TH, *route(logits_TE, SHAPE.router, 2, bias_E), max_tokens=5)
    if kind == "float64":
        logits_TE = logits_TE.double()
    if kind == "transposed":
        logits_TE = logits_TE.T.contiguous().T
    bias_E = None if bias_E is None else bias_E.bfloat16()
    found_TH = layer.from_logits(X_TH, logits_TE, bias_E, max_tokens=5)
    torch.testing.assert_close(found_TH, wanted_TH)


CALLS = {
    "ids": (([[0, 1]] * 5, torch.ones(5, 2)), {}, "topk_ids is a list"),
    "words": ((torch.zeros(5, 2).int(), torch.ones(5, 2)), {"max_tokens": "3"}, "max_tokens='3'"),
    "part": ((torch.zeros(5, 2).int(), torch.ones(5, 2)), {"max_tokens": 5.0}, "max_tokens=5.0"),
    "less": ((torch.zeros(5, 2).int(), torch.ones(5, 2)), {"max_tokens": -3}, "at least 0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_things_that_are_none(name):
    given, more, words = CALLS[name]
    with pytest.raises(InputError, match=words):
        layer_of()(X_TH, *given, **more)


def test_a_fused_call_says_it_too():
    with pytest.raises(InputError, match="max_tokens='3'"):
        layer_of(stage="fused_capacity+loop").from_logits(X_TH, torch.zeros(5, 4), max_tokens="3")


BUILDS = {
    "weights": ({"weights": None}, "weights=None: give an ExpertWeights"),
    "stage": ({"stage": 2}, "stage=2: give a name"),
    "capacity": ({"max_tokens_per_rank": True}, "max_tokens_per_rank=True"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_builds_of_things_that_are_none(name):
    changes, words = BUILDS[name]
    given = {"stage": "02", "weights": random_weights(SHAPE, range(4)), "max_tokens_per_rank": 8}
    placed = {"placement": contiguous(4, 1), "group": groups.single()}
    with pytest.raises(InputError, match=words):
        build(shape=SHAPE, **placed, **(given | changes))


class Spoilt(ExpertWeights):
    """Weights that raise what no check has foreseen."""

    @property
    def dtype(self) -> torch.dtype:
        raise ZeroDivisionError("no dtype")


ALONE = {  # what only the last rank gives to `build`, and what all hear
    "placement": ({"placement": None}, "placement=None: give a Placement"),
    "map": ({"placement": [0, 0, 1, 1]}, r"placement=\[0, 0, 1, 1\]: give a Placement"),
    "shape": ({"shape": "tiny"}, "shape='tiny': give a MoEShape"),
    "wishes": ({"wishes": {"maskable": True}}, r"wishes=\{'maskable': True\}: give an epmoe"),
    "no wishes": ({"wishes": {}}, r"wishes=\{\}: give an epmoe"),
    "check": ({"check": "false"}, "check='false': give True or False"),
    "not to be sent": ({"placement": lambda: None}, "placement=<function .*: give a Placement"),
    "unforeseen": ({"weights": "spoilt"}, r"cannot be built: ZeroDivisionError\('no dtype'\)"),
    "ring": ({"stage": "fused_capacity+loop", "ring": "false"}, "ring='false': give True or False"),
    "invariant": (
        {"stage": "03", "batch_invariant": "false"},
        "batch_invariant='false': give True or False",
    ),
}


def built_with(group, name: str) -> str:
    changes = dict(ALONE[name][0]) if group.rank == group.size - 1 else {}
    placed = contiguous(4, group.size)
    weights = random_weights(SHAPE, placed.experts_of(group.rank))
    if changes.get("weights") == "spoilt":
        changes["weights"] = Spoilt(weights.w13_E2IH, weights.w2_EHI)
    given = {"stage": "02", "shape": SHAPE, "weights": weights, "placement": placed}
    try:
        return f"no error: {build(group=group, max_tokens_per_rank=8, **{**given, **changes})}"
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("name", ALONE)
def test_all_ranks_hear_what_one_cannot_build(pool, name):
    """The others would wait for it in their first exchange."""
    first, second = pool.run(built_with, name, ranks=2)
    assert first == second
    assert re.match(f"rank 1: .*{ALONE[name][1]}", first), first


def test_without_a_group_there_is_nobody_to_tell():
    with pytest.raises(InputError, match="group=None: give an EPGroup"):
        build("02", SHAPE, random_weights(SHAPE, range(4)), contiguous(4, 1), None, 8)  # pyright: ignore


def test_a_switch_that_is_off_is_off():
    layer = layer_of(stage="03", batch_invariant=False, ring=False)
    assert not layer.capabilities.batch_invariant
    assert layer_of(stage="03", batch_invariant=True).capabilities.batch_invariant


def test_a_chosen_stage_has_switches_too():
    with pytest.raises(InputError, match="fused_triton: batch_invariant=1: give True or False"):
        layer_of(stage="auto", batch_invariant=1)


def test_a_mask_is_a_collection():
    with pytest.raises(InputError, match=r"gone=0: give the ranks as a collection, such as \(0,\)"):
        layer_of().mask_ranks(0)


def one_is_wrong(group):
    """What every rank says when the last one brings nonsense, in checked mode."""
    layer, last = layer_of(group, check=True), group.rank == group.size - 1
    ids_TK, weights_TK = torch.zeros(1, 2).int(), torch.ones(1, 2)
    attempts = {
        "logits": lambda: layer.from_logits(X_TH[:1], torch.zeros(1, 1 if last else 4)),
        "ids": lambda: layer(X_TH[:1], [[0, 1]] if last else ids_TK, weights_TK),
        "declared": lambda: layer(X_TH[:1], ids_TK, weights_TK, max_tokens="3" if last else 3),
        "mask": lambda: layer.mask_ranks(0 if last else ()),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            said[name] = f"no error: {attempt()}"
        except InputError as error:
            said[name] = str(error)
    return said


def test_in_checked_mode_all_ranks_hear_of_it():
    """A rank that raises alone would leave the others waiting."""
    first, second = launch(one_is_wrong, ranks=2, timeout=60)
    assert first == second
    assert all(words.startswith("rank 1: ") for words in first.values()), first


def test_an_older_recording_of_another_size_is_not_played():
    """Peers with 5 tokens were recorded last: a call of 3 must not get the answer of an older recording."""
    group = LoopbackGroup(0, 2, "cpu")
    layer = layer_of(group)

    def calls(*tokens):
        ids_TK, weights_TK = torch.zeros(8, 2).int(), torch.ones(8, 2)
        return [(torch.randn(t, 8), ids_TK[:t], weights_TK[:t]) for t in tokens]

    group.record_peers(layer, calls(3, 3))
    last = calls(3, 5)
    group.record_peers(layer, last)
    with pytest.raises(InputError, match=r"nothing was recorded for 3 tokens.*max_tokens=5"):
        layer(*last[0])
    assert layer(*last[0], max_tokens=5).shape == (3, 8)
