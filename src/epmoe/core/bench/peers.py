"""How rows of all ranks come to a subject that wants them gathered, and how its sums go home.

| setting       | gather                                             | home                                    |
|---------------|----------------------------------------------------|-----------------------------------------|
| several ranks | all-gather of rows, ids and weights, coalesced     | reduce-scatter                          |
| loopback      | one local copy of what the peers would have sent   | one kernel: read R rows, write T sums   |
| one rank      | nothing                                            | nothing                                 |

vLLM's all-gather/reduce-scatter manager does the first row: three gathers in one NCCL group, one reduce-scatter in the
layer's dtype. In loopback a stage's exchange is one local copy each way too (`epmoe.core.loopback`).

Legend: T tokens here, EP ranks, R = EP * T rows, H hidden, K experts per token.
"""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.core.bench.workload import Draw
from epmoe.core.groups import EPGroup
from epmoe.core.loopback import LoopbackGroup, Recordings, new_recordings

Gathered = tuple[Tensor, Tensor, Tensor]


class Peers(Protocol):
    """Both calls are collective."""

    def gather(self, draw: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Gathered:
        """x_RH, ids_RK int32 and weights_RK float32 of all source ranks, in rank order."""
        ...

    def home(self, y_RH: Tensor) -> Tensor:
        """y_TH: this rank's rows, added up over the ranks."""
        ...

    def describe(self) -> str: ...


class NoPeers:
    """One rank owns everything."""

    def gather(self, draw: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Gathered:
        return x_TH, ids_TK, weights_TK

    def home(self, y_RH: Tensor) -> Tensor:
        return y_RH

    def describe(self) -> str:
        return "no exchange: one rank"


class RankPeers:
    """All-gather and reduce-scatter over the ranks of the group."""

    def __init__(self, group: EPGroup):
        self.group = group
        self._coalesced = group.transport == "nccl" and hasattr(dist, "_coalescing_manager")

    def gather(self, draw: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Gathered:
        mine = (x_TH, ids_TK, weights_TK)
        everyone = tuple(t.new_empty(self.group.size * len(t), *t.shape[1:]) for t in mine)
        if self._coalesced:
            try:
                self._exchange(everyone, mine, coalesced=True)
            except (RuntimeError, AttributeError, TypeError):  # not every torch can: said so below
                self._coalesced = False
        if not self._coalesced:
            self._exchange(everyone, mine, coalesced=False)
        return everyone  # pyright: ignore[reportReturnType]

    def _exchange(self, everyone: Sequence[Tensor], mine: Sequence[Tensor], coalesced: bool):
        together = (
            dist._coalescing_manager(self.group.process_group, device=self.group.device)
            if coalesced
            else contextlib.nullcontext()
        )
        with together:
            for out, x in zip(everyone, mine, strict=True):
                self.group.all_gather(out, x)

    def home(self, y_RH: Tensor) -> Tensor:
        y_TH = y_RH.new_empty(len(y_RH) // self.group.size, y_RH.shape[1])
        self.group.reduce_scatter(y_TH, y_RH)
        return y_TH

    def describe(self) -> str:
        how = "coalesced in one NCCL group" if self._coalesced else "one after the other"
        return f"torch.distributed: three all-gathers {how}, one reduce-scatter"


class LoopbackPeers:
    """What the peers would have sent lies ready in one buffer per draw; a gather is one copy of it."""

    def __init__(self, ranks: int, draws: Sequence[Draw]):
        self.ranks = ranks
        self._recorded = [_flat(draw) for draw in draws]
        self._received = torch.empty_like(self._recorded[0])
        first = draws[0].sources[0]
        self._hidden, self._topk, self._dtype = (
            first.x_TH.shape[1],
            first.ids_TK.shape[1],
            first.x_TH.dtype,
        )
        self._rows = ranks * len(first.x_TH)

    def gather(self, draw: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Gathered:
        self._received.copy_(self._recorded[draw])
        row = self._hidden * self._dtype.itemsize
        sizes = [self._rows * row, self._rows * self._topk * 4, self._rows * self._topk * 4]
        x, ids, weights = self._received.split(sizes)
        return (
            x.view(self._dtype).view(self._rows, self._hidden),
            ids.view(torch.int32).view(self._rows, self._topk),
            weights.view(torch.float32).view(self._rows, self._topk),
        )

    def home(self, y_RH: Tensor) -> Tensor:
        return y_RH.view(self.ranks, -1, y_RH.shape[1]).sum(dim=0)

    def describe(self) -> str:
        return (
            "loopback: one local copy for the all-gather, one summing copy for the reduce-scatter"
        )


def _flat(draw: Draw) -> Tensor:
    """All sources' rows, then all ids, then all weights, as bytes."""
    columns = zip(*((s.x_TH, s.ids_TK, s.weights_TK) for s in draw.sources), strict=True)
    return torch.cat([torch.cat(c).contiguous().view(-1).view(torch.uint8) for c in columns])


class DrawLoopback(LoopbackGroup):
    """A loopback group that remembers what the peers sent in each draw; `use` says which one is played."""

    def __init__(self, rank: int, size: int, device: torch.device):
        super().__init__(rank, size, device)
        self._by_draw: dict[int, Recordings] = {}

    def use(self, draw: int) -> None:
        """Calls, and captures, from now on receive the peers' rows of this draw."""
        self._recorded = self._by_draw.setdefault(draw, new_recordings())
