"""How expert weights may lie in memory: read where they are, never copied, so that updates in place are seen.

Each expert's matrix has to be dense. Matrices may lie further apart than their size, as when they are parts of one
packed tensor, or closer: a stride of 0 gives all experts one matrix.

Legend: E_local experts here, A rows of an expert's matrix, B its columns.
"""

import torch
from torch import Tensor

from epmoe.core.errors import UnsupportedError
from epmoe.core.weights import ExpertWeights


def reasons_against(weights: ExpertWeights) -> list[str]:
    """Why kernels cannot read these weights where they lie, in words; empty when they can."""
    reasons = []
    for name, w_EAB in (("w13", weights.w13_E2IH), ("w2", weights.w2_EHI)):
        try:
            expert_rows(name, w_EAB)
        except UnsupportedError as error:
            reasons.append(str(error))
    return reasons


def expert_rows(name: str, w_EAB: Tensor) -> int:
    """Rows of length B from where one expert begins to where the next does: A, or more where there is a gap.

    Raises:
        UnsupportedError: a matrix is not dense, or the next one does not begin where a row could.
    """
    experts, rows, columns = w_EAB.shape
    expert, row, value = w_EAB.stride()
    dense = (rows < 2 or row == columns) and (columns < 2 or value == 1)
    if w_EAB.numel() == 0 or (experts < 2 and dense):
        return rows
    if not dense or expert % columns:
        raise UnsupportedError(
            f"{name} has shape {tuple(w_EAB.shape)} and strides {w_EAB.stride()}: its kernels read matrices of strides "
            f"({columns}, 1), a multiple of {columns} values apart; pass {name}.contiguous()"
        )
    return expert // columns


def as_rows(name: str, w_EAB: Tensor) -> tuple[Tensor, int]:
    """All experts as one matrix [rows, B] in the same memory, gaps included; and `expert_rows`, which may raise."""
    experts, rows, columns = w_EAB.shape
    apart = expert_rows(name, w_EAB)
    total = (experts - 1) * apart + rows if experts else 0
    return torch.as_strided(w_EAB, (total, columns), (columns, 1)), apart
