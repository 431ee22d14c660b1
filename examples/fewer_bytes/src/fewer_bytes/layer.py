"""Let the weights travel: every rank gathers the experts and computes its own tokens, which never leave it.

What changes: no token is sent, so there is nothing to dispatch or to combine. No exchange and experts can say that: it
is a layer written whole.
Why: a rank's work is its own tokens, whatever they name. No routing, however skewed, makes it wait for another.
When it wins: prompts so long that the weights are fewer bytes than the rows, E * I / K tokens of every rank in 16 bits.
What it costs: at any fewer tokens, by far too many bytes; and during a call each rank holds the weights of all.

Source of the idea: what fully sharded data parallelism does to every layer, https://arxiv.org/abs/1910.02054.

Legend: T tokens here, K experts per token, G gathered slots, H hidden, I intermediate.
"""

import torch
from torch import Tensor

from epmoe.core.capabilities import Capabilities
from epmoe.core.layer import MoELayer
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.placement import KINDS
from epmoe.core.registry import Stage
from epmoe.core.split import Rows
from epmoe.core.weights import ExpertWeights
from fewer_bytes.experts import PaddedExperts


class TravellingWeights(MoELayer):
    """All-gather the weights, then be a layer of one rank."""

    def __init__(self, spec: LayerSpec):
        super().__init__(spec)
        self.most = max(spec.placement.counts())  # ranks hold different numbers: all send so many

    # --8<-- [start:forward]
    def forward(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> Tensor:
        """The rows are our own tokens; their slots count through the ranks' experts, rank by rank."""
        owner_TK = self.spec.tables.owners_of(topk_ids_TK)
        slot_TK = self.spec.tables.slots_of(topk_ids_TK)
        gathered_TK = torch.where(slot_TK >= 0, owner_TK * self.most + slot_TK, -1)
        rows = Rows(x_RH=x_TH, slots_RJ=gathered_TK, weights_RJ=topk_weights_TK)
        mine = self.spec.weights
        everyones = ExpertWeights(self._gather(mine.w13_E2IH), self._gather(mine.w2_EHI))
        return PaddedExperts(everyones)(rows).to(x_TH.dtype)

    # --8<-- [end:forward]

    def _gather(self, mine: Tensor) -> Tensor:
        """[E_local, ...] here -> [G, ...] everywhere."""
        padded = mine.new_zeros(self.most, *mine.shape[1:])
        padded[: len(mine)] = mine
        gathered = mine.new_empty(self.spec.group.size * self.most, *mine.shape[1:])
        self.spec.group.all_gather(gathered, padded)
        return gathered


# --8<-- [start:stage]
STAGE = Stage(
    summary="all-gather the weights of all experts; tokens stay at home",
    capabilities=Capabilities(placements=KINDS, deterministic=True, maskable=True),
    factory=TravellingWeights,
    options={},
)
# --8<-- [end:stage]
