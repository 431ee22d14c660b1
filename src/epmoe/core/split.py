"""A split layer: an exchange moves rows to the experts and back, experts compute in between.

What passes between the two is `Rows`; what an exchange promises of them, and what experts can work with, is written
down in `epmoe.core.contract` and checked when a pair is composed. So exchanges and experts can be mixed.

Legend: T tokens here, H hidden, K experts per token, R received rows, J places of a row (K when a whole token travels,
1 when one assignment travels).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from epmoe.core import ambient, ledger
from epmoe.core.agreement import agree
from epmoe.core.ambient import calling
from epmoe.core.checks import problem_with_logits
from epmoe.core.contract import DeliveryCheck
from epmoe.core.errors import ContractError
from epmoe.core.layer import MoELayer
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.parts import ExchangePart, ExpertsPart
from epmoe.core.phases import phase
from epmoe.core.routing import for_kernels
from epmoe.core.values import is_whole
from epmoe.core.workspace import of_options


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What an exchange delivers to the experts of one rank, as its `Delivers` promises.

    Attributes:
        x_RH: [R, H] received rows; a row without a valid slot may hold anything, NaN included.
        slots_RJ: [R, J] int32, local expert slots, -1 for "not an expert of this rank".
        weights_RJ: [R, J] float32 routing weights; meaningless where the slot is -1.
    """

    x_RH: Tensor
    slots_RJ: Tensor
    weights_RJ: Tensor

    def clone(self) -> "Rows":
        """A copy in memory of its own: what an exchange delivers may lie in buffers that the next call uses again."""
        return Rows(
            x_RH=self.x_RH.clone(),
            slots_RJ=self.slots_RJ.clone(),
            weights_RJ=self.weights_RJ.clone(),
        )


State = TypeVar("State")


class Exchange(ABC, Generic[State]):
    """Moves rows to the owner ranks and results back. All calls are collective."""

    @abstractmethod
    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> tuple[Rows, State]:
        """Send tokens to the ranks that own their experts; returns what this rank received, and how to go back.

        No rank brings more than `capacity` tokens, a number that all ranks share.
        """

    @abstractmethod
    def combine(self, y_RH: Tensor, state: State) -> Tensor:
        """Bring y_RH [R, H] home and add it up: y_TH [T, H] in x's dtype, contiguous, no alias of a buffer."""

    def describe(self) -> dict[str, object]:
        """What it chose, for the layer's report."""
        return {}

    def close(self) -> None:
        """Give back what it holds beside the workspace. Collective."""


class RoutingExchange(Exchange[State]):
    """An exchange that can choose the experts of a token itself, on the way out."""

    @property
    def routes(self) -> bool:
        """Whether it does so in this layer; its options may say no."""
        return True

    @abstractmethod
    def route_and_dispatch(
        self,
        x_TH: Tensor,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        capacity: int,
    ) -> tuple[Rows, State]:
        """As `dispatch` of what `epmoe.core.routing.route` would choose, which is written to topk_ids, topk_weights."""


class Experts(ABC):
    """Computes the local experts: y_RH[r] = sum over j of weights[r, j] * f_{slots[r, j]}(x[r])."""

    @abstractmethod
    def __call__(self, rows: Rows) -> Tensor:
        """y_RH [R, H] contiguous, in the dtype that the exchange takes; zeros for a row without a slot."""

    def warmup_capacities(self) -> tuple[int, ...]:
        """Capacities from 1 to C whose calls use other kernels than those of 1 and C; `MoELayer.warmup` runs them."""
        return ()

    def describe(self) -> dict[str, object]:
        """What they chose, for the layer's report."""
        return {}


class SplitLayer(MoELayer, Generic[State]):
    """dispatch -> experts -> combine, with buffers in a workspace that layers may share."""

    exchange: Exchange[State]
    experts: Experts

    def __init__(self, spec: LayerSpec, exchange: ExchangePart, experts: ExpertsPart):
        super().__init__(spec)
        self.parts = (exchange, experts)
        self.workspace, self._owns_workspace = of_options(spec.options)
        self._promises = DeliveryCheck(spec, exchange.delivers)
        self.exchange = exchange.factory(spec, self.workspace)
        self.experts = experts.factory(spec, self.workspace, exchange.delivers)

    # --8<-- [start:forward]
    def forward(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> Tensor:
        with self.workspace.turn(x_TH.device):
            with phase("dispatch"):
                sent = self.exchange.dispatch(x_TH, topk_ids_TK, topk_weights_TK, capacity)
            return self._compute_and_combine(*sent, capacity)

    def _compute_and_combine(self, rows: Rows, state: State, capacity: int) -> Tensor:
        self._hold(lambda: self._promises.broken_by(rows, capacity))  # in checked mode
        with phase("experts", rows=len(rows.x_RH)):
            y_RH = self.experts(rows)
        self._hold(lambda: self._promises.unfit_answer(rows, y_RH))  # in checked mode
        with phase("combine"):
            return self.exchange.combine(y_RH, state)

    # --8<-- [end:forward]

    def from_logits(
        self,
        x_TH: Tensor,
        logits_TE: Tensor,
        bias_E: Tensor | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Tensor:
        """As in `MoELayer`; an exchange that routes by itself does it on the way out, where one round will do."""
        exchange, spec = self.exchange, self.spec
        if not self.fuses_router or not self._one_round(x_TH, max_tokens):
            return super().from_logits(x_TH, logits_TE, bias_E, max_tokens=max_tokens)
        assert isinstance(exchange, RoutingExchange)
        self._raise(problem_with_logits(spec, x_TH, logits_TE, bias_E), {})
        logits_TE = for_kernels(logits_TE)
        bias_E = None if bias_E is None else for_kernels(bias_E.float())
        ids_TK = torch.empty(len(x_TH), spec.shape.topk, dtype=torch.int32, device=x_TH.device)
        weights_TK = torch.empty_like(ids_TK, dtype=torch.float32)
        routing = (ids_TK, weights_TK)  # written by the exchange
        self._refuse_capture()
        self._check(x_TH, *routing, max_tokens)
        capacity = max_tokens or spec.max_tokens_per_rank
        device = x_TH.device
        with calling(device, self), phase("call", tokens=len(x_TH)), self.workspace.turn(device):
            with phase("dispatch"):
                sent = exchange.route_and_dispatch(x_TH, logits_TE, bias_E, *routing, capacity)
            if self.counter is not None:
                self.counter.add(ids_TK)
            return self._compute_and_combine(*sent, capacity)

    @property
    def fuses_router(self) -> bool:
        exchange, spec = self.exchange, self.spec
        # checked mode and lost="renormalise" look at ids or weights between router and exchange
        unseen = not spec.check and spec.lost == "drop"
        return unseen and isinstance(exchange, RoutingExchange) and exchange.routes

    def warmup_capacities(self) -> tuple[int, ...]:
        """Adds those of the experts."""
        return (*super().warmup_capacities(), *self.experts.warmup_capacities())

    def describe(self) -> dict[str, object]:
        """Adds the parts, what they chose, and the bytes of all buffers."""
        exchange, experts = self.parts
        return {
            **super().describe(),
            "exchange": exchange.name,
            "experts": experts.name,
            **self.exchange.describe(),
            **self.experts.describe(),
            "workspace_bytes": self.workspace.nbytes,
        }

    def close(self) -> None:
        if not self.closed:
            self.exchange.close()
            if self._owns_workspace:
                self.workspace.clear()
        super().close()

    def _one_round(self, x_TH: Tensor, max_tokens: int | None) -> bool:
        """Whether every rank knows, without asking, that one round of this capacity is enough."""
        if not isinstance(x_TH, Tensor) or not (max_tokens is None or is_whole(max_tokens)):
            return False  # the usual way refuses it
        tokens, limit = len(x_TH), self.spec.max_tokens_per_rank
        declared = limit if max_tokens is None else max_tokens
        asks = max_tokens is None and self.spec.group.size > 1
        return not asks and 1 <= declared <= limit and tokens <= declared

    def _hold(self, find: Callable[[], str | None]) -> None:
        """In checked mode: raise a broken promise of any rank on all of them. Collective. Else nothing is looked at."""
        if not self.spec.check or ambient.capturing(self.spec.device):
            return
        with ledger.paused():  # the check is not the layer
            broken = find()
        names = "+".join(part.name for part in self.parts)
        agree(self.spec.group, {}, ContractError(f"{names}: {broken}") if broken else None)
