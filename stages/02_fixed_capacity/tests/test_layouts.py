"""Which layouts of weights torch's grouped product can read; what the stage says of one is held against torch itself.

Legend: E experts of this rank, A rows of a matrix, B its columns.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epmoe.core.errors import UnsupportedError
from epmoe.core.shape import MoEShape
from epmoe.core.split import Rows
from epmoe.core.verify import tolerance
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.fixed_capacity import experts as module
from epmoe.fixed_capacity.experts import StaticExperts

DENSE = random_weights(
    MoEShape(hidden=16, intermediate=24, experts=5, topk=2), range(5), torch.bfloat16
)


def rows_apart(w_EAB: Tensor, gap: int) -> Tensor:
    """The same matrices, with `gap` values between the rows."""
    wide = w_EAB.new_zeros(*w_EAB.shape[:2], w_EAB.shape[2] + gap)
    wide[..., : w_EAB.shape[2]] = w_EAB
    return wide[..., : w_EAB.shape[2]]


def every_second_column(w_EAB: Tensor) -> Tensor:
    wide = w_EAB.new_zeros(*w_EAB.shape[:2], 2 * w_EAB.shape[2])
    wide[..., ::2] = w_EAB
    return wide[..., ::2]


def columns_first(w_EAB: Tensor) -> Tensor:
    return w_EAB.transpose(1, 2).contiguous().transpose(1, 2)


def experts_apart(w_EAB: Tensor, gap: int) -> Tensor:
    """The same matrices, with `gap` values between the experts."""
    experts, rows, columns = w_EAB.shape
    wide = w_EAB.new_zeros(experts, rows * columns + gap)
    wide[:, : rows * columns] = w_EAB.flatten(1)
    return wide.as_strided(w_EAB.shape, (rows * columns + gap, columns, 1))


def begins_late(w_EAB: Tensor, by: int) -> Tensor:
    flat = w_EAB.new_zeros(by + w_EAB.numel())
    flat[by:] = w_EAB.flatten()
    return flat[by:].view(w_EAB.shape)


LAYOUTS = {
    "contiguous": (lambda w: w, True),
    "rows 8 values apart": (lambda w: rows_apart(w, 8), True),
    "rows 3 values apart": (lambda w: rows_apart(w, 3), False),
    "every second column": (every_second_column, False),
    "columns first": (columns_first, True),
    "experts 8 values apart": (lambda w: experts_apart(w, 8), True),
    "experts 3 values apart": (lambda w: experts_apart(w, 3), False),
    "begins 16 bytes late": (lambda w: begins_late(w, 8), True),
    "begins 2 bytes late": (lambda w: begins_late(w, 1), False),
    "one matrix for all": (lambda w: w[:1].expand_as(w), True),
}
FIT = [name for name, (_, fits) in LAYOUTS.items() if fits]
UNFIT = [name for name, (_, fits) in LAYOUTS.items() if not fits]
TORCH_LOOKS = ["rows 3 values apart", "every second column"]  # at the rest on a GPU only
each_weight = pytest.mark.parametrize("which", ["w13_E2IH", "w2_EHI"])


def lay_out(layout: str, which: str) -> ExpertWeights:
    lay, _ = LAYOUTS[layout]
    return replace(DENSE, **{which: lay(getattr(DENSE, which))})


def wrong_by(weights: ExpertWeights, product: str) -> float:
    """The largest difference from what blocks make of dense weights of these values, relative to all that is there."""
    generator = torch.Generator().manual_seed(0)
    rows = Rows(
        x_RH=torch.randn(3, 16, generator=generator).bfloat16(),
        slots_RJ=torch.tensor([[3, -1], [0, 4], [1, 3]], dtype=torch.int32),
        weights_RJ=torch.ones(3, 2),
    )
    dense = ExpertWeights(weights.w13_E2IH.contiguous(), weights.w2_EHI.contiguous())
    compute = StaticExperts(weights)
    compute.product = product  # as on Hopper, whatever was chosen here
    wanted_RH = StaticExperts(dense)(rows)
    return float((compute(rows) - wanted_RH).abs().max() / wanted_RH.abs().max())


@pytest.fixture
def hopper(monkeypatch):
    """The choice as it is made there, of weights that lie on the CPU."""
    reasons = module._against_grouped_mm
    monkeypatch.setattr(
        module, "_against_grouped_mm", lambda w: [r for r in reasons(w) if "CUDA" not in r]
    )


@each_weight
@pytest.mark.parametrize("layout", FIT)
def test_what_grouped_mm_can_read_is_taken(hopper, layout, which):
    weights = lay_out(layout, which)
    assert StaticExperts(weights).product == "grouped_mm"
    assert wrong_by(weights, "grouped_mm") <= tolerance(torch.bfloat16)


@each_weight
@pytest.mark.parametrize("layout", UNFIT)
def test_what_grouped_mm_cannot_read_goes_by_blocks_and_a_wish_is_refused(hopper, layout, which):
    """Where torch itself would refuse, it would do so in the first call, after the first exchange."""
    weights = lay_out(layout, which)
    assert StaticExperts(weights).product == "blocks"
    name = which.split("_")[0]
    with pytest.raises(UnsupportedError, match=rf"{name} has strides .* multiples of 16 bytes"):
        StaticExperts(weights, "grouped_mm")


@each_weight
@pytest.mark.parametrize("layout", TORCH_LOOKS)
def test_torch_refuses_what_is_refused_here(layout, which):
    with pytest.raises(RuntimeError, match="strides"):
        wrong_by(lay_out(layout, which), "grouped_mm")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_read_any_layout(layout):
    assert wrong_by(lay_out(layout, "w13_E2IH"), "blocks") == 0
    assert wrong_by(lay_out(layout, "w2_EHI"), "blocks") == 0
