"""What the cases inside vLLM share: layers made by vLLM's own factory, on one rank and without an engine."""

# pyright: reportMissingImports=false

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from epmoe.core.routing import route
from epmoe.core.shape import MoEShape
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.vllm_plugin import bare, hook

SMALL = MoEShape(name="small", hidden=64, intermediate=96, experts=8, topk=2)
FIRST = "02_fixed_capacity"
names = (f"layers.{n}.experts" for n in itertools.count())


class Bench:
    """One world of one rank; makes staged and native layers in it."""

    def __init__(self, config):
        self.config = config

    def make(self, shape=SMALL, bias_E=None, dtype=torch.float32, weights=None, **arguments):
        runner = bare.make(self.config, shape, dtype, bias_E, name=next(names), **arguments)
        bare.load(runner, weights or random_weights(shape, range(shape.experts), dtype))
        return runner

    def native(self, *given, **arguments):
        with unhooked():
            return self.make(*given, **arguments)

    def call(self, runner, x_TH, logits_TE, **context):
        return bare.call(self.config, runner, x_TH.clone(), logits_TE.clone(), **context)


@contextmanager
def unhooked():
    from vllm.model_executor.custom_op import op_registry_oot

    held = op_registry_oot.pop(hook.RUNNER)
    try:
        yield
    finally:
        op_registry_oot[hook.RUNNER] = held


@contextmanager
def using(**changes):
    """Another stage, or other settings, for the layers that are made inside."""
    held = hook.current()
    hook.active = replace(held, **changes)
    try:
        yield
    finally:
        hook.active = held


@contextmanager
def changed(thing, **values):
    held = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(thing, name, value)


def inputs(shape=SMALL, tokens=13, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, shape.hidden, generator=generator).to(dtype)
    return x_TH, torch.randn(tokens, shape.experts, generator=generator)


def by_hand(shape, weights: ExpertWeights, x_TH, logits_TE, bias_E=None, slots=None):
    """Two loops over tokens and their experts, in float32."""
    ids_TK, weights_TK = route(logits_TE, shape.router, shape.topk, bias_E)
    y_TH, inner = torch.zeros(x_TH.shape), shape.intermediate
    for t, (ids, gates) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for e, gate in zip(ids, gates, strict=True):
            both = weights.w13_E2IH[e].float() @ x_TH[t].float()
            h = torch.nn.functional.silu(both[:inner]) * both[inner:]
            y_TH[t] += gate * (weights.w2_EHI[e].float() @ h)
    return y_TH


class Spy:
    """Stands before a stage's layer and keeps what it was called with."""

    def __init__(self, layer):
        self.layer, self.calls = layer, []
        self.spec, self.capabilities = layer.spec, layer.capabilities

    def __call__(self, x_TH, ids_TK, weights_TK, max_tokens=None):
        self.calls.append((x_TH, ids_TK, weights_TK, max_tokens))
        return self.layer(x_TH, ids_TK, weights_TK, max_tokens=max_tokens)


def near(found, expected, allowed=1e-5, what="output"):
    assert found.shape == expected.shape, (
        f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    )
    scale = max(1e-30, float(expected.abs().max()))
    off = float((found.float() - expected.float()).abs().max()) / scale
    assert off <= allowed, f"{what} is off by {off:.1e} of its largest value, allowed {allowed:.0e}"


def refused(work: Callable[[], Any], *words: str) -> None:
    """`work` raises a ValueError that has all these words."""
    said = ""
    try:
        work()
    except ValueError as error:
        said = str(error)
    missing = [word for word in words if word not in said]
    assert not missing, f"expected a refusal with {missing}, found {said or 'none'}"
