"""Router, routed experts and shared expert: how often each is counted, and on whose tokens."""

import pytest
import torch
from torch import Tensor

from epmoe.core import groups
from epmoe.core.block import MoEBlock, shared_expert
from epmoe.core.errors import InputError
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.routing import Router, RouterConfig, route
from epmoe.core.shape import MoEShape
from epmoe.core.weights import random_weights
from epmoe.reference.oracle import expert_output

SHAPE = MoEShape(hidden=16, intermediate=24, experts=4, topk=2)
SIGMOID = RouterConfig(scoring="sigmoid", scale=2.5)


class Routed:
    """In the place of a layer: remembers its call, answers a constant."""

    def __init__(self, answer: float):
        self.answer, self.call = answer, None

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.call = (x_TH, ids_TK, weights_TK)
        return torch.full_like(x_TH, self.answer)


def router(dtype: torch.dtype = torch.float32, bias: Tensor | None = None) -> Router:
    generator = torch.Generator().manual_seed(3)
    weight_EH = torch.randn(4, 16, generator=generator).to(dtype)
    return Router(weight_EH=weight_EH, config=SIGMOID, topk=2, bias_E=bias)


def tokens(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_float32_whatever_the_tokens_are(dtype):
    x_TH, some = tokens(9, dtype), router(dtype)
    logits_TE = x_TH.float() @ some.weight_EH.float().T
    ids_TK, weights_TK = some(x_TH)
    wanted_ids_TK, wanted_TK = route(logits_TE, SIGMOID, 2)
    assert torch.equal(ids_TK, wanted_ids_TK)
    assert torch.equal(weights_TK, wanted_TK)
    assert weights_TK.dtype == torch.float32


def test_the_bias_chooses_and_does_not_weigh():
    """A bias of 10 puts expert 3 first in every token; its weight is its score without it, scaled once."""
    x_TH, bias_E = tokens(9), torch.tensor([0.0, 0.0, 0.0, 10.0])
    ids_TK, weights_TK = router(bias=bias_E)(x_TH)
    assert (ids_TK == 3).any(dim=1).all()
    scores_TE = (x_TH @ router().weight_EH.T).sigmoid()
    chosen_TK = scores_TE.gather(1, ids_TK.long())
    wanted_TK = 2.5 * chosen_TK / chosen_TK.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights_TK, wanted_TK)


def test_without_a_shared_expert_the_routed_part_is_the_result():
    x_TH, layer = tokens(5), Routed(3.0)
    y_TH = MoEBlock(router(), layer)(x_TH)
    assert torch.equal(y_TH, torch.full_like(x_TH, 3.0))
    assert layer.call is not None
    wanted = (x_TH, *router()(x_TH))
    assert all(torch.equal(a, b) for a, b in zip(layer.call, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_shared_expert_counts_once_and_is_rounded_once(dtype):
    """routed + shared, added in float32: the router's factor of 2.5 is not in the shared part."""
    x_TH, shared = tokens(5, dtype), random_weights(SHAPE, [2], dtype)
    y_TH = MoEBlock(router(dtype), Routed(3.0), shared)(x_TH)
    wanted_TH = torch.stack([expert_output(x.double(), shared, 0) for x in x_TH]) + 3.0
    assert y_TH.dtype == dtype
    torch.testing.assert_close(
        y_TH.double(), wanted_TH, rtol=0, atol=8 * torch.finfo(dtype).eps * float(wanted_TH.abs().max())
    )  # fmt: skip
    exact_TH = (torch.full_like(x_TH, 3.0).float() + shared_expert(x_TH, shared)).to(dtype)
    assert torch.equal(y_TH, exact_TH)


def test_the_shared_part_stays_in_float32():
    """An answer over float16's largest number survives until it is added up: 80000 - 60000 = 20000."""
    loud = random_weights(SHAPE, [0], torch.float16)
    loud.w13_E2IH.zero_()
    loud.w2_EHI.zero_()
    loud.w13_E2IH[:, 0, 0], loud.w13_E2IH[:, 24, 0] = 32.0, 1.0
    loud.w2_EHI[:, :, 0] = 2500.0  # silu(32) * 1 * 2500
    x_TH = torch.zeros(3, 16, dtype=torch.float16)
    x_TH[:, 0] = 1
    assert (shared_expert(x_TH, loud) == 80000.0).all()
    y_TH = MoEBlock(router(torch.float16), Routed(-60000.0), loud)(x_TH)
    assert (y_TH == 20000.0).all()


@pytest.mark.parametrize("shared", [None, random_weights(SHAPE, [0])], ids=["routed", "shared"])
def test_there_are_no_gradients(shared):
    """Those of the shared part alone would be silently wrong: the routed part has none."""
    layer = build(
        "02", SHAPE, random_weights(SHAPE, range(4)), contiguous(4, 1), groups.single(), 8
    )
    y_TH = MoEBlock(router(), layer, shared)(tokens(5).requires_grad_())
    assert not y_TH.requires_grad


def test_no_tokens():
    y_TH = MoEBlock(router(), Routed(3.0), random_weights(SHAPE, [0]))(tokens(0))
    assert y_TH.shape == (0, 16)


@pytest.mark.parametrize("experts", [[], [0, 1]], ids=["none", "two"])
def test_several_shared_experts_are_refused(experts):
    with pytest.raises(InputError, match=f"shared holds {len(experts)} experts: expected one"):
        MoEBlock(router(), Routed(0.0), random_weights(SHAPE, experts))


@pytest.mark.parametrize("name", ["00", "01", "02"])
def test_a_whole_block(name):
    """With a real layer in it, against the formula."""
    weights, shared = random_weights(SHAPE, range(4)), random_weights(SHAPE, [9])
    layer = build(name, SHAPE, weights, contiguous(4, 1), groups.single(), 8)
    x_TH = tokens(6)
    y_TH = MoEBlock(router(), layer, shared)(x_TH)
    ids_TK, weights_TK = router()(x_TH)
    for t, x_H in enumerate(x_TH.double()):
        wanted_H = expert_output(x_H, shared, 0)
        for e, w in zip(ids_TK[t].tolist(), weights_TK[t].tolist(), strict=True):
            wanted_H += w * expert_output(x_H, weights, e)
        torch.testing.assert_close(y_TH[t].double(), wanted_H, rtol=0, atol=1e-4)
    layer.close()
