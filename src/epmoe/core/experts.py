"""The per-expert loop: the simplest expert compute that is not wasteful.

Assignments are sorted by expert, so that every expert sees one contiguous block and is one pair of matrix products. How
long each block is must be known on the host: one read of E_local + 1 numbers, a host synchronisation.

Legend: R received rows, J places per row, N = R * J assignments, H hidden, I intermediate.
"""

import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.capabilities import Capabilities
from epmoe.core.contract import Delivers
from epmoe.core.memory import LayerSize, Memory
from epmoe.core.numerics import matmul_float32, sum_in_order, swiglu
from epmoe.core.parts import ExpertsPart
from epmoe.core.split import Experts, Rows
from epmoe.core.weights import ExpertWeights


class LoopExperts(Experts):
    """Experts one after the other, over rows sorted by expert."""

    def __init__(self, weights: ExpertWeights):
        self.weights = weights

    # --8<-- [start:loop]
    def __call__(self, rows: Rows) -> Tensor:
        """See `Experts`. Rows without a slot are never read."""
        order_N, counts = self._sort_by_slot(rows.slots_RJ)
        places = rows.slots_RJ.shape[1]
        f_NH = rows.x_RH.new_zeros(order_N.numel(), self.weights.hidden, dtype=torch.float32)
        start = counts[0]  # slot -1 sorts first: nothing to compute
        for slot, count in enumerate(counts[1:]):
            if count:
                mine = order_N[start : start + count]
                f_NH[mine] = self._expert(slot, rows.x_RH[mine // places])
            start += count
        ledger.record_rows(sum(counts[1:]))
        return weigh_and_sum(f_NH, rows)

    def _sort_by_slot(self, slots_RJ: Tensor) -> tuple[Tensor, list[int]]:
        flat_N = slots_RJ.flatten().long()
        order_N = flat_N.argsort(stable=True)  # stable: within an expert, rows keep their order
        counts = flat_N.new_zeros(self.weights.experts + 1)
        counts.index_add_(0, flat_N + 1, torch.ones_like(flat_N))
        return order_N, counts.tolist()  # host sync: block lengths

    # --8<-- [end:loop]

    def _expert(self, slot: int, x_MH: Tensor) -> Tensor:
        """f(x) of one expert in float32: fp16's 65504 bounds neither gate and up nor what is not weighed yet."""
        h_MI = swiglu(matmul_float32(x_MH, self.weights.w13_E2IH[slot].T)).to(x_MH.dtype)
        return matmul_float32(h_MI, self.weights.w2_EHI[slot].T)


# --8<-- [start:weigh]
def weigh_and_sum(f_NH: Tensor, rows: Rows) -> Tensor:
    """y_RH [R, H] float32: apply the routing weights and add the J places of each row, first to last.

    Where a place has no expert its weight may be anything, NaN too, and is replaced by zero; its f must be zero
    already, which it is where f_NH [N, H] starts as zeros and only places with an expert are written.
    """
    valid_RJ = rows.slots_RJ >= 0
    weights_RJ = torch.where(valid_RJ, rows.weights_RJ, 0.0)
    f_RJH = f_NH.view(*rows.slots_RJ.shape, f_NH.shape[1])
    weighted_RJH = f_RJH * weights_RJ[:, :, None]
    return sum_in_order(weighted_RJH.unbind(dim=1))


# --8<-- [end:weigh]


def widened(size: LayerSize) -> int:
    """Bytes of a copy of one operand's value in `matmul_float32`: on a CPU it widens what is not float32."""
    return 4 if size.device == "cpu" and size.dtype != torch.float32 else 0


def _memory(size: LayerSize, delivers: Delivers) -> Memory:
    """Worst: all rows are for one expert. Their float32 outputs, and what the products or the weighing hold."""
    H, I, value = size.shape.hidden, size.shape.intermediate, size.dtype.itemsize
    N, R, wide = size.assignments, size.rows(delivers.places), widened(size)
    gate_up = N * (wide * H + 8 * I) + 2 * wide * H * I
    swiglu = N * I * (value + 16)
    down = N * (I * (value + wide) + 4 * H) + wide * H * I
    products = N * H * value + max(gate_up, swiglu, down)
    weighing = H * (4 * N + 8 * R)
    return Memory(kept=0, call=4 * N * H + max(products, weighing) + 48 * N)


EXPERTS = ExpertsPart(
    name="loop",
    summary="loop over the local experts",
    capabilities=Capabilities(deterministic=True),
    factory=lambda spec, workspace, delivers: LoopExperts(spec.weights),
    memory=_memory,
)
