"""All local experts in two batched matrix products, over blocks that are padded to the fullest expert.

What changes: the loop over experts launches two products for each; here are two in all, with a batch of E_local.
Why: launches, not arithmetic, are the cost of many small experts.
When it wins: rows that are spread evenly.
What it costs: E_local * M rows are computed, M being the rows of the fullest expert: under skew almost all is padding.

Worked for E_local = 3, slots of N = 6 assignments 2 0 -1 2 2 0: counts 2 0 3, so M = 3 and blocks (1 5 .) (. . .)
(0 3 4), nine rows for five assignments. Source of the idea: the dense dispatch of GShard, https://arxiv.org/abs/2006.16668.

Legend: R received rows, J places of a row, N = R * J assignments, S of them here, M rows of a block, E = E_local,
H hidden, I intermediate.
"""

import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.capabilities import Capabilities
from epmoe.core.experts import weigh_and_sum
from epmoe.core.numerics import matmul_float32, swiglu
from epmoe.core.parts import ExpertsPart
from epmoe.core.split import Experts, Rows
from epmoe.core.weights import ExpertWeights


class PaddedExperts(Experts):
    """Local experts as one batch."""

    def __init__(self, weights: ExpertWeights):
        self.weights = weights

    # --8<-- [start:compute]
    def __call__(self, rows: Rows) -> Tensor:
        """Sort by expert, copy to blocks, multiply, copy back. Rows without a slot are never read."""
        order_S, expert_S, place_S, most = self._places(rows.slots_RJ)
        x_EMH = rows.x_RH.new_zeros(self.weights.experts, most, self.weights.hidden)
        x_EMH[expert_S, place_S] = rows.x_RH[order_S // rows.slots_RJ.shape[1]]
        gate_up_EM2I = matmul_float32(x_EMH, self.weights.w13_E2IH.transpose(1, 2))
        h_EMI = swiglu(gate_up_EM2I).to(x_EMH.dtype)
        y_EMH = matmul_float32(h_EMI, self.weights.w2_EHI.transpose(1, 2))
        ledger.record_rows(self.weights.experts * most)
        f_NH = y_EMH.new_zeros(rows.slots_RJ.numel(), self.weights.hidden)
        f_NH[order_S] = y_EMH[expert_S, place_S]
        return weigh_and_sum(f_NH, rows)

    # --8<-- [end:compute]

    def _places(self, slots_RJ: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """order_S, the assignments by expert; the expert of each and its place in that block; and M."""
        slot_N = slots_RJ.flatten().long()
        count_E1 = slot_N.new_zeros(self.weights.experts + 1)  # -1 counts as one more, the first
        count_E1.index_add_(0, slot_N + 1, torch.ones_like(slot_N))
        nobodys, *counts = count_E1.tolist()  # host sync: the size of the blocks
        order_S = slot_N.argsort(stable=True)[nobodys:]
        expert_S = slot_N[order_S]
        first_E1 = count_E1.cumsum(0) - count_E1 - nobodys
        place_S = torch.arange(len(order_S), device=slot_N.device) - first_E1[expert_S + 1]
        return order_S, expert_S, place_S, max(counts, default=0)


# --8<-- [start:part]
EXPERTS = ExpertsPart(
    name="padded",
    summary="two batched products over blocks as long as the fullest expert's",
    capabilities=Capabilities(deterministic=True),
    factory=lambda spec, workspace, delivers: PaddedExperts(spec.weights),
)
# --8<-- [end:part]
