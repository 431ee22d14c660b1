"""The expert map on the device: what an exchange looks an id up in, and what changes when ranks are lost.

Two tables for this rank's own tokens, `owner_E` and `slot_E`; and the same as every source rank sees them, `owner_SE`
and `slot_SE`, for an exchange that decides at the receiver. Sources differ only where experts have replicas.
An expert that lives nowhere has owner EP (no rank) and slot -1: it goes the way of an id of -1, without a test.

Whoever looks things up keeps a tensor of this class, never a copy: `mask` writes in place, so that a captured CUDA
graph sees the change at its next replay.

Legend: E experts, EP ranks, S source rank, T tokens, K experts per token.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from epmoe.core.ids import look_up, named
from epmoe.core.numerics import sum_in_order
from epmoe.core.placement import Placement, gone_ranks


class ExpertTables:
    """Owner and slot of every expert, int32, on `device`.

    Attributes:
        owner_E, slot_E: [E] as `rank` sees them.
        owner_SE, slot_SE: [EP, E] as every source rank sees them.
        gone: the ranks that are masked now, ascending.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device | str = "cpu"):
        self.placement, self.rank = placement, rank
        self.gone: tuple[int, ...] = ()
        size = (placement.ranks, placement.experts)
        self.owner_SE = torch.empty(size, dtype=torch.int32, device=device)
        self.slot_SE = torch.empty_like(self.owner_SE)
        self.owner_E, self.slot_E = self.owner_SE[0].clone(), self.slot_SE[0].clone()
        self.mask(())

    def mask(self, gone: Iterable[int]) -> None:
        """From now on the ranks `gone` hold nothing; () takes every rank back. In place, on the current stream.

        Raises:
            InputError: an unknown rank, or all of them.
        """
        self.gone = gone_ranks(gone, self.placement.ranks)
        sources = range(self.placement.ranks)
        owners = [self.placement.owners_from(source, self.gone) for source in sources]
        slots = [self.placement.slots_from(source, self.gone) for source in sources]
        self.owner_SE.copy_(torch.tensor(owners, dtype=torch.int32))
        self.slot_SE.copy_(torch.tensor(slots, dtype=torch.int32))
        self._look_from(self.rank)

    @contextmanager
    def seen_from(self, source: int) -> Iterator[None]:
        """`owner_E` and `slot_E` are those of another rank inside: for a process that plays several."""
        self._look_from(source)
        try:
            yield
        finally:
            self._look_from(self.rank)

    def lost(self) -> tuple[int, ...]:
        """Experts that no living rank holds."""
        gone = set(self.gone)
        return tuple(e for e, homes in enumerate(self.placement.homes) if gone.issuperset(homes))

    def owners_of(self, ids: Tensor) -> Tensor:
        """The owner rank of every id, of any shape; EP, which is no rank, where it names no expert or a lost one."""
        return look_up(self.owner_E, ids, self.placement.ranks)

    def slots_of(self, ids: Tensor) -> Tensor:
        """The slot of every id at its owner; -1 where it names no expert or a lost one."""
        return look_up(self.slot_E, ids, -1)

    # --8<-- [start:renormalise]
    def renormalise(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Scale a token's remaining weights so that they add up to what all of them did; zeros where none remains.

        A token that has lost nothing keeps its bits. Fixed shapes, no host read; K terms are added first to last, so a
        token's weights do not depend on its batch.
        """
        real_TK = named(ids_TK, self.placement.experts)
        left_TK = self.owners_of(ids_TK) < self.placement.ranks
        kept_TK = torch.where(left_TK, weights_TK, 0)
        all_T1 = sum_in_order(torch.where(real_TK, weights_TK, 0).unbind(1))[:, None]
        kept_T1 = sum_in_order(kept_TK.unbind(1))[:, None]
        return torch.where(kept_T1 == 0, kept_TK, kept_TK * (all_T1 / kept_T1))

    # --8<-- [end:renormalise]

    def _look_from(self, source: int) -> None:
        self.owner_E.copy_(self.owner_SE[source])
        self.slot_E.copy_(self.slot_SE[source])
