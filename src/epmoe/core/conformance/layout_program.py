"""Weights whose matrices are not dense: a layer that reads them as they lie, or refuses them on every rank."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from epmoe.core.cases import Case
from epmoe.core.conformance.program import caught, judge
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer, build
from epmoe.core.verify import Row, bring
from epmoe.core.weights import ExpertWeights


def _rows_apart(w_EAB: Tensor) -> Tensor:
    """Rows of three values more, as in a tensor that is padded; a reader of the gaps gets NaN."""
    wide = w_EAB.new_full((*w_EAB.shape[:2], w_EAB.shape[2] + 3), float("nan"))
    wide[:, :, :-3] = w_EAB
    return wide[:, :, :-3]


def _every_second_column(w_EAB: Tensor) -> Tensor:
    wide = w_EAB.new_full((*w_EAB.shape[:2], 2 * w_EAB.shape[2]), float("nan"))
    wide[:, :, ::2] = w_EAB
    return wide[:, :, ::2]


def _transposed(w_EAB: Tensor) -> Tensor:
    """Column after column, as where the checkpoint holds the transposed matrix."""
    return w_EAB.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows_apart": _rows_apart,
    "every_second_column": _every_second_column,
    "transposed": _transposed,
}


def laid_out(group: EPGroup, case: Case, layout: str) -> tuple[str, Row | None]:
    """What `build` says to weights of this layout, and the worst row of call 0 where it says nothing."""
    placement, lay = case.placed(), LAYOUTS[layout]
    dense = case.weights_of(placement.experts_of(group.rank)).to(group.device)
    weights = ExpertWeights(lay(dense.w13_E2IH), lay(dense.w2_EHI))
    built: list[MoELayer] = []

    def make() -> None:
        options = dict[str, Any](case.options)
        C = case.max_tokens_per_rank
        built.append(build(case.stage, case.shape, weights, placement, group, C, **options))

    said = caught(make)
    if said:
        return said, None
    (layer,) = built
    row = judge(case, 0, group, layer(*bring(group, case, 0)))
    layer.close()
    return "", row
