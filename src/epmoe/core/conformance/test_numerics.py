"""Precision, repeatability, factors that must count once."""

import math

import pytest
import torch

from epmoe.core.cases import Case
from epmoe.core.conformance import program
from epmoe.core.conformance.shapes import SMALL
from epmoe.core.routing import RouterConfig
from epmoe.core.shape import MoEShape
from epmoe.core.verify import tolerance


def test_8B_same_bits(stage, capabilities, run, interpreted):
    """8B: the same call 20 times and on a fresh layer, where the stage declares itself deterministic."""
    if not capabilities.deterministic:
        pytest.skip("not offered: the stage does not declare itself deterministic")
    case = Case(stage=stage, shape=SMALL.with_(topk=4), tokens=((9, 6, 0),), kind="zipf")
    for found in run(program.repeats, case, 3 if interpreted else 20):
        assert found["repeated"], found
        assert found["rebuilt"], found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8B_same_bits_on_cuda(stage, capabilities, gpu_run, dtype):
    """8B: 100 times on a GPU, at sizes where several tiles share an expert."""
    if not capabilities.deterministic:
        pytest.skip("not offered: the stage does not declare itself deterministic")
    shape = MoEShape(hidden=256, intermediate=128, experts=16, topk=4)
    case = Case(stage=stage, shape=shape, tokens=((130, 0, 33, 257),), kind="zipf", dtype=dtype)
    for found in gpu_run(program.repeats, case, 100):
        assert found["repeated"], found
        assert found["rebuilt"], found


def test_8B_bits_independent_of_the_batch(stage, capabilities, run):
    """8B: tokens in another order and in two halves, where the stage declares itself batch invariant."""
    if not capabilities.batch_invariant:
        pytest.skip("not offered: the stage does not declare itself batch invariant")
    case = Case(stage=stage, shape=SMALL.with_(topk=4), tokens=((9, 6, 0),), kind="zipf")
    for found in run(program.repeats, case, 1):
        assert found["permuted"], found
        assert found["halved"], found


@pytest.mark.parametrize("ranks", [1, 2])
def test_6C_sum_over_experts_in_float32(stage, run, ranks):
    """6C: bf16, K = 8 answers of +100 and -100 that nearly cancel: off by one rounding of the result at most.

    A sum, or weights, in bf16 would be off by more than ten.
    """
    shape = MoEShape(hidden=16, intermediate=16, experts=8, topk=8)
    case = Case(stage=stage, shape=shape, tokens=((3, 5)[:ranks],), dtype=torch.bfloat16)
    for roundings in run(program.alternating_sum, case):
        assert roundings <= 1.01


@pytest.mark.parametrize("ranks", [1, 2])
def test_6E_large_answer_small_weight(stage, run, ranks):
    """6E: fp16, an expert answers 1e5, over fp16's 65504; with weight 0.1 the result is 1e4, not infinity."""
    shape = MoEShape(hidden=16, intermediate=16, experts=4, topk=1)
    case = Case(stage=stage, shape=shape, tokens=((3, 5)[:ranks],), dtype=torch.float16)
    for low, high in run(program.loud_expert, case, 102400.0, 0.1):
        assert abs(low - 10240) <= 10240 * tolerance(torch.float16)
        assert abs(high - 10240) <= 10240 * tolerance(torch.float16)


@pytest.mark.parametrize("ranks", [1, 2])
def test_6E_large_up_small_gate(stage, run, ranks):
    """6E: fp16, up is 131072, over fp16's 65504, and a gate of 1/4 makes 18421 of it: no infinity in between."""
    shape = MoEShape(hidden=16, intermediate=16, experts=4, topk=1)
    case = Case(stage=stage, shape=shape, tokens=((3, 5)[:ranks],), dtype=torch.float16)
    wanted = 0.25 / (1 + math.exp(-0.25)) * 131072 / 16
    for low, high in run(program.loud_up, case):
        assert abs(low - wanted) <= wanted * tolerance(torch.float16)
        assert abs(high - wanted) <= wanted * tolerance(torch.float16)


ROUTERS = {
    "softmax": RouterConfig(),
    "sigmoid": RouterConfig(scoring="sigmoid", scale=2.5),
    "groups": RouterConfig(scoring="sigmoid", groups=4, topk_groups=2, renormalize=False),
}


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_routing_from_logits(stage, run, router):
    """`from_logits` is `route` and a call, however a stage fuses them."""
    case = Case(stage=stage, shape=SMALL.with_(topk=3, router=router), tokens=((5, 0, 7),))
    for rows in run(program.from_logits, case):
        assert all(row is None or row.right for row in rows), rows


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_6B_12D_scale_and_shared_expert_count_once(stage, run, ranks):
    """6B, 12D: factor 2.5 on the routed part alone, and the shared expert once, for any number of ranks."""
    case = Case(stage=stage, shape=SMALL, tokens=((5, 0, 3, 4)[:ranks],))
    for found in run(program.block, case):
        assert max(found.values()) <= 1e-5, found
