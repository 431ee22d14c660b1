"""A split layer: an exchange moves rows to the experts and back, experts compute in between.

The contract between the two is `Rows`. It says everything once: ids are slots of THIS rank, -1 is nothing; the routing
weights travel and are applied by the experts, in float32; every row comes back reduced over its J places. So any
exchange goes with any experts.

Legend: T tokens here, H hidden, K experts per token, R received rows, J places of a row (K when a whole token travels,
1 when one assignment travels).
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from epmoe.core.layer import LayerSpec, MoELayer
from epmoe.core.phases import phase


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What an exchange delivers to the experts of one rank.

    Attributes:
        x_RH: [R, H] received rows; a row without a valid slot may hold anything, NaN included.
        slots_RJ: [R, J] int32, local expert slots, -1 for "not an expert of this rank".
        weights_RJ: [R, J] float32 routing weights; meaningless where the slot is -1.
    """

    x_RH: Tensor
    slots_RJ: Tensor
    weights_RJ: Tensor


State = TypeVar("State")


class Exchange(Protocol[State]):
    """Moves rows to the owner ranks and results back. Both calls are collective."""

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> tuple[Rows, State]:
        """Send tokens to the ranks that own their experts; returns what this rank received, and how to go back.

        No rank brings more than `capacity` tokens, a number that all ranks share.
        """
        ...

    def combine(self, y_RH: Tensor, state: State) -> Tensor:
        """Bring y_RH [R, H] float32 home and add it up: y_TH [T, H] in x's dtype."""
        ...

    def close(self) -> None:
        """Give back buffers. Collective."""
        ...


class Experts(Protocol):
    """Computes the local experts: y_RH[r] = sum over j of weights[r, j] * f_{slots[r, j]}(x[r]), float32."""

    def __call__(self, rows: Rows) -> Tensor: ...


class SplitLayer(MoELayer, Generic[State]):
    """dispatch -> experts -> combine."""

    def __init__(self, spec: LayerSpec, exchange: Exchange[State], experts: Experts):
        super().__init__(spec)
        self.exchange, self.experts = exchange, experts

    def forward(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> Tensor:
        # --8<-- [start:forward]
        with phase("dispatch"):
            rows, state = self.exchange.dispatch(x_TH, topk_ids_TK, topk_weights_TK, capacity)
        with phase("experts", rows=len(rows.x_RH)):
            y_RH = self.experts(rows)
        with phase("combine"):
            return self.exchange.combine(y_RH, state)
        # --8<-- [end:forward]

    def close(self) -> None:
        if not self.closed:
            self.exchange.close()
        super().close()
