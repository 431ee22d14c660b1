"""Does a token's result depend on who shares its batch? Not by this stage's doing: only a matrix library could.

Legend: T tokens, H hidden, K experts per token, M rows of a block.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epmoe.core import groups
from epmoe.core.cases import Case
from epmoe.core.groups import EPGroup
from epmoe.core.numerics import matmul_float32, swiglu
from epmoe.core.shape import MoEShape
from epmoe.core.split import Rows
from epmoe.core.verify import bring, build_case, differ, tolerance
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.fixed_capacity.experts import BLOCK, StaticExperts

STAGE = Path(__file__).parents[1].name
USUAL = MoEShape(hidden=64, intermediate=96, experts=4, topk=2)
SHAPES = [
    pytest.param(USUAL, id="H64-I96"),
    pytest.param(MoEShape(hidden=130, intermediate=65, experts=4, topk=3), id="H130-I65"),
    pytest.param(MoEShape(hidden=5, intermediate=7, experts=4, topk=2), id="H5-I7"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# ---- what a term depends on


def places_in_blocks(slots: list[list[int]]) -> dict[tuple[int, int], int]:
    """(row, place) -> its row within a block of its expert, in plain Python."""
    seen: dict[int, int] = {}
    where = {}
    for r, row in enumerate(slots):
        for j, slot in enumerate(row):
            where[r, j] = seen.get(slot, 0) % BLOCK
            seen[slot] = seen.get(slot, 0) + 1
    return where


def one_term(weights: ExpertWeights, slot: int, x_H: Tensor, place: int) -> Tensor:
    """f(x) in the given row of a block that is zero elsewhere."""
    x_MH = x_H.new_zeros(BLOCK, len(x_H))
    x_MH[place] = x_H
    h_MI = swiglu(matmul_float32(x_MH, weights.w13_E2IH[slot].clone().T)).to(x_H.dtype)
    return matmul_float32(h_MI, weights.w2_EHI[slot].clone().T)[place]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_term_is_its_token_its_expert_and_its_place(shape, dtype):
    """Bit for bit: a term computed beside 15 rows of other tokens is the one computed beside zeros."""
    weights = random_weights(shape, range(4), dtype)
    generator = torch.Generator().manual_seed(1)
    x_RH = torch.randn(41, shape.hidden, generator=generator).to(dtype)
    slots_RJ = torch.randint(-1, 4, (41, shape.topk), generator=generator, dtype=torch.int32)
    weights_RJ = torch.rand(41, shape.topk, generator=generator)
    y_RH = StaticExperts(weights)(Rows(x_RH=x_RH, slots_RJ=slots_RJ, weights_RJ=weights_RJ))
    where = places_in_blocks(slots_RJ.tolist())
    for r, row in enumerate(slots_RJ.tolist()):
        total_H = torch.zeros(shape.hidden)
        for j, slot in enumerate(row):
            if slot >= 0:
                total_H += weights_RJ[r, j] * one_term(weights, slot, x_RH[r], where[r, j])
        assert torch.equal(y_RH[r], total_H), (r, row)


# ---- the whole layer


def library_treats_rows_alike(case: Case) -> bool:
    """The same token in each row of a block, among others: the same bits everywhere?"""
    weights = case.weights_of(range(case.shape.experts)).to(case.dtype)
    x_MH = case.tokens_of(0, 0)[:BLOCK]
    terms = {
        tuple(one_term(weights, slot, x_MH[0], place).tolist())
        for slot in range(case.shape.experts)
        for place in range(BLOCK)
    }
    return len(terms) == case.shape.experts


def company(group: EPGroup, case: Case) -> dict[str, list[Tensor]]:
    """This rank's tokens in one call, and the same tokens in other company: pairs that should have the same bits."""
    layer = build_case(group, case)
    x_TH, ids_TK, weights_TK = bring(group, case, 0)
    T, K = ids_TK.shape
    y_TH = layer(x_TH, ids_TK, weights_TK)
    found = {}

    def compare(name: str, wanted_TH: Tensor, came_TH: Tensor) -> None:
        found[name] = [wanted_TH, came_TH]

    order_T = torch.randperm(T, generator=torch.Generator().manual_seed(5))
    compare("permuted", y_TH[order_T], layer(x_TH[order_T], ids_TK[order_T], weights_TK[order_T]))
    alone = [0, T // 2, T - 1]
    parts = [layer(x_TH[t : t + 1], ids_TK[t : t + 1], weights_TK[t : t + 1]) for t in alone]
    compare("alone", y_TH[alone], torch.cat(parts))
    keep = slice(T - 3, T) if group.rank == 0 else slice(0, 0)
    compare("one rank alone", y_TH[keep], layer(x_TH[keep], ids_TK[keep], weights_TK[keep]))
    others_TH, strangers_TK = x_TH.clone(), ids_TK.clone()
    others_TH[: T - 3] *= -100
    compare("other values", y_TH[T - 3 :], layer(others_TH, ids_TK, weights_TK)[T - 3 :])
    strangers_TK[: T - 3] = torch.arange(K, dtype=torch.int32)
    compare("other routing", y_TH[T - 3 :], layer(x_TH, strangers_TK, weights_TK)[T - 3 :])
    layer.close()
    small = build_case(group, replace(case, capacity=7))
    compare("rounds", y_TH, small(x_TH, ids_TK, weights_TK))
    small.close()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_does_not_see_its_company(stage, run, ranks, shape, dtype):
    """Alone, permuted, among other values and other routing, in rounds: the same bits, if the library has none else.

    Only values of the same routing leave every token in its place, so they must not show whatever the library does.
    """
    tokens = ((26, 19)[:ranks],)
    case = Case(
        stage=stage, shape=shape, tokens=tokens, dtype=dtype, kind="zipf", capacity=26,
        options={"product": "blocks"},
    )  # fmt: skip
    alike = library_treats_rows_alike(case)
    for found in run(company, case):
        assert not differ(*found["other values"])
        for name, (wanted_TH, came_TH) in found.items():
            assert not (alike and differ(wanted_TH, came_TH)), name
            size = float(wanted_TH.float().abs().amax()) if len(wanted_TH) else 1.0
            torch.testing.assert_close(came_TH, wanted_TH, rtol=0, atol=4 * tolerance(dtype) * size)


def test_a_batch_that_is_broken_spoils_nobody_else(stage):
    """NaN and infinity in other tokens, in the same blocks: the last three rows keep their bits."""
    case = Case(stage=stage, shape=USUAL, tokens=((20,),), kind="zipf")
    layer = build_case(groups.single(), case)
    x_TH, ids_TK, weights_TK = bring(groups.single(), case, 0)
    y_TH = layer(x_TH, ids_TK, weights_TK)
    x_TH[:17:2], x_TH[1:17:2] = torch.nan, torch.inf
    assert not differ(layer(x_TH, ids_TK, weights_TK)[17:], y_TH[17:])
    layer.close()
