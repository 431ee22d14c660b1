"""The simplest expert-parallel layer: everybody gets every token, computes what its own experts owe, and all add up.

What it does: all-gather tokens and routing; loop over the local experts; reduce-scatter the sums.
Why: nothing has to be found, counted or sorted across ranks; every buffer has a fixed size.
When it wins: small batches and few ranks, where every rank is hit by almost every token anyway.
What it costs: every token goes to every rank (EP * C rows), and float32 sums come back.

Legend: T tokens here, C = capacity of a rank, EP ranks, R = EP * C rows, H hidden, K experts per token, E experts.
"""

import torch
from torch import Tensor

from epmoe.core.capabilities import Capabilities
from epmoe.core.compose import compose
from epmoe.core.contract import Delivers
from epmoe.core.experts import EXPERTS
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.memory import LayerSize, Memory
from epmoe.core.parts import ExchangePart
from epmoe.core.placement import KINDS
from epmoe.core.split import Exchange, Rows


class AllGather(Exchange[Tensor]):
    """Exchange: all-gather out, reduce-scatter home."""

    def __init__(self, spec: LayerSpec):
        self.group = spec.group
        self.tables, (ranks, device) = spec.tables, (spec.group.size, spec.device)
        self.sources_S1 = torch.arange(ranks, device=device)[:, None]

    # --8<-- [start:dispatch]
    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> tuple[Rows, Tensor]:
        """Gather everybody's tokens. The state that leads home is x itself: its length and dtype."""
        ids_RK = self._gather(topk_ids_TK, capacity, padding=-1)
        rows = Rows(
            x_RH=self._gather(x_TH, capacity, padding=0),
            slots_RJ=self._my_slots(ids_RK),
            weights_RJ=self._gather(topk_weights_TK, capacity, padding=0),
        )
        return rows, x_TH

    def _gather(self, mine: Tensor, capacity: int, padding: float) -> Tensor:
        """[T, ...] here -> [EP * C, ...] everywhere; ranks hold different T, so everybody pads to C."""
        padded = mine.new_full((capacity, *mine.shape[1:]), padding)
        padded[: len(mine)] = mine
        everyone = mine.new_empty((self.group.size * capacity, *mine.shape[1:]))
        self.group.all_gather(everyone, padded)
        return everyone

    # --8<-- [end:dispatch]

    # --8<-- [start:slots]
    def _my_slots(self, ids_RK: Tensor) -> Tensor:
        """Global ids -> slots of this rank, -1 for everything that is not ours (or names no expert).

        Row block s came from rank s. Where an expert has replicas, s says which of them it means.
        """
        tables = self.tables
        real_RK = (ids_RK >= 0) & (ids_RK < tables.owner_SE.shape[1])
        safe_RK = torch.where(real_RK, ids_RK, 0).long()
        asked = self.sources_S1, safe_RK.view(self.group.size, -1)  # [EP, C * K]
        mine_RK = real_RK & (tables.owner_SE[asked] == self.group.rank).view_as(ids_RK)
        return torch.where(mine_RK, tables.slot_SE[asked].view_as(ids_RK), -1)

    # --8<-- [end:slots]

    # --8<-- [start:combine]
    def combine(self, y_RH: Tensor, state: Tensor) -> Tensor:
        """Add up what all ranks owe our tokens, in float32."""
        y_CH = y_RH.new_empty(len(y_RH) // self.group.size, y_RH.shape[1])
        self.group.reduce_scatter(y_CH, y_RH)
        return y_CH[: len(state)].to(state.dtype).contiguous()

    # --8<-- [end:combine]


def _memory(size: LayerSize) -> Memory:
    """Gathered tokens, ids and weights, one padded copy of this rank's, and the sums that come home."""
    H, value = size.shape.hidden, size.dtype.itemsize
    tokens = (size.rows("topk") + size.capacity) * H * value
    indices = 40 * (size.assignments + size.capacity * size.shape.topk)
    return Memory(kept=0, call=tokens + indices + size.capacity * H * 4)


EXCHANGE = ExchangePart(
    name="all_gather",
    summary="all-gather, reduce-scatter",
    capabilities=Capabilities(
        placements=KINDS, graph_capturable=True, deterministic=True, maskable=True
    ),
    delivers=Delivers(places="topk", sizes="static"),
    factory=lambda spec, workspace: AllGather(spec),
    memory=_memory,
)

STAGE = compose(
    EXCHANGE, EXPERTS, summary="all-gather, loop over the local experts, reduce-scatter"
)
