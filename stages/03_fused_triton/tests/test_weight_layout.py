"""Weights are read where they lie: gaps between experts, updates in place; anything else is refused on every rank."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: @triton.jit looks at it

from epmoe.core import groups
from epmoe.core.conformance.program import caught
from epmoe.core.groups import EPGroup
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.shape import MoEShape
from epmoe.core.split import Rows
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.fused_triton import kernels
from epmoe.fused_triton.weight_layout import as_rows

SHAPE = MoEShape(hidden=16, intermediate=8, experts=4, topk=2)


def wide(w: torch.Tensor, rows: int = 0, columns: int = 0) -> torch.Tensor:
    """The same values, `rows` rows and `columns` columns of each matrix further apart."""
    room = w.new_full((w.shape[0], w.shape[1] + rows, w.shape[2] + columns), float("nan"))
    room[:, : w.shape[1], : w.shape[2]] = w
    return room[:, : w.shape[1], : w.shape[2]]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(lambda w: w, id="dense"),
        pytest.param(lambda w: wide(w, rows=1), id="a-spare-row"),
        pytest.param(lambda w: w[:1].expand_as(w), id="one-matrix-for-all"),
        pytest.param(lambda w: w[:0], id="no-experts"),
        pytest.param(lambda w: w.transpose(1, 2)[:1, :, :1], id="one-column"),
        pytest.param(lambda w: wide(w, columns=3)[:, :1][:1], id="one-row"),
    ],
)
def test_one_matrix_of_all_rows_has_every_expert(layout):
    w = layout(random_weights(SHAPE, range(4)).w13_E2IH)
    flat, apart = as_rows("w13", w)
    for expert, matrix in enumerate(w):
        assert torch.equal(flat[expert * apart :][: w.shape[1]], matrix)


def products(weights: ExpertWeights, config: kernels.GemmConfig) -> torch.Tensor:
    """f_NH of three rows for four experts."""
    device = weights.device
    slots_RJ = torch.tensor([[0, 3], [1, -1], [3, 2]], dtype=torch.int32, device=device)
    x_RH = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(device)
    rows = Rows(x_RH=x_RH, slots_RJ=slots_RJ, weights_RJ=torch.ones(3, 2, device=device))
    tiles = kernels.group_slots(slots_RJ, 4, kernels.make_tiles(6, 4, 16, device))
    h_NI, f_NH = torch.zeros(6, 8, device=device), torch.zeros(6, 16, device=device)
    kernels.gate_up(rows, weights.w13_E2IH, tiles, h_NI, config)
    kernels.down(rows, h_NI, weights.w2_EHI, tiles, f_NH, config)
    return f_NH


@pytest.mark.parametrize("how", [{}, {"swap_ab": True}, {"tma": True}], ids=str)
def test_gaps_are_never_multiplied(how):
    """A column block is wider than the matrix, so a descriptor reads on into the gap: what it finds is not stored."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense, config = (
        random_weights(SHAPE, range(4)).to(device),
        kernels.GemmConfig(16, 32, 16, **how),
    )
    gaps = ExpertWeights(wide(dense.w13_E2IH, rows=3), wide(dense.w2_EHI, rows=1))
    f_NH = products(gaps, config)
    assert torch.equal(f_NH, products(dense, config))
    assert f_NH[0].any()


@pytest.mark.parametrize("gap", [0, 1])
def test_weights_written_in_place_are_seen(gap):
    given = random_weights(SHAPE, range(4))
    weights = ExpertWeights(wide(given.w13_E2IH, gap), wide(given.w2_EHI, gap))
    layer = build("03", SHAPE, weights, contiguous(4, 1), groups.single(), 3)
    x_TH, ids_TK = torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [1, 2]])
    before = layer(x_TH, ids_TK, torch.ones(3, 2))
    weights.w2_EHI.mul_(2)
    assert torch.equal(layer(x_TH, ids_TK, torch.ones(3, 2)), 2 * before)


def build_with(group: EPGroup, gaps: dict[str, int]) -> str:
    """What the second rank's weights make `build` say on this rank."""
    placed = contiguous(4, group.size)
    weights = random_weights(SHAPE, placed.experts_of(group.rank))
    if group.rank == 1:
        weights = ExpertWeights(wide(weights.w13_E2IH, **gaps), weights.w2_EHI)
    return caught(lambda: build("03", SHAPE, weights, placed, group, 3))


def test_weights_that_no_kernel_reads_are_refused_on_every_rank(pool):
    said = pool.run(build_with, {"columns": 1}, ranks=2)
    assert len(set(said)) == 1
    assert said[0].startswith("UnsupportedError: rank 1: 03_fused_triton cannot serve this layer")
    assert "w13 has shape (2, 16, 16) and strides" in said[0]
    assert "(272, 17, 1)" in said[0]
    assert "pass w13.contiguous()" in said[0]
