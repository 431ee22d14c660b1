"""Which rank owns which expert, and at which place of its weight tensors.

The map is a pair of tables over the global experts: the owner rank, and the slot on that rank. Worked on the toy
(4 experts on 2 ranks):

    contiguous    owner 0 0 1 1   slot 0 1 0 1
    round robin   owner 0 1 0 1   slot 0 0 1 1

When EP does not divide E, the first ranks hold one expert more: 30 experts on 8 ranks are 4 4 4 4 4 4 3 3, and 3
experts on 4 ranks are 1 1 1 0. A rank without an expert still takes part in every exchange.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from epmoe.core.errors import InputError


@dataclass(frozen=True)
class Placement:
    """An expert map: `owners[e]` is the owner rank of global expert e; slots follow ascending expert ids."""

    owners: tuple[int, ...]
    ranks: int
    kind: str = "explicit"

    def __post_init__(self):
        if self.ranks < 1:
            raise InputError(f"ranks={self.ranks}: a placement needs at least one rank")
        if not self.owners:
            raise InputError("a placement needs at least one expert")
        for expert, owner in enumerate(self.owners):
            if not isinstance(owner, int) or not 0 <= owner < self.ranks:
                raise InputError(
                    f"expert {expert} is placed on rank {owner!r}: ranks are 0 to {self.ranks - 1}"
                )

    @property
    def experts(self) -> int:
        """E, the number of global experts."""
        return len(self.owners)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """slot[e]: the place of expert e in its owner's weight tensors."""
        filled = [0] * self.ranks
        slots = []
        for owner in self.owners:
            slots.append(filled[owner])
            filled[owner] += 1
        return tuple(slots)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Global ids of the experts of `rank`, in slot order."""
        if not 0 <= rank < self.ranks:
            raise InputError(f"rank={rank}: this placement has ranks 0 to {self.ranks - 1}")
        return tuple(e for e, owner in enumerate(self.owners) if owner == rank)

    def counts(self) -> tuple[int, ...]:
        """E_local of every rank."""
        return tuple(len(self.experts_of(rank)) for rank in range(self.ranks))

    def owner_table(self, device: torch.device | str = "cpu") -> Tensor:
        """owner_E [E] int32 on `device`."""
        return torch.tensor(self.owners, dtype=torch.int32, device=device)

    def slot_table(self, device: torch.device | str = "cpu") -> Tensor:
        """slot_E [E] int32 on `device`."""
        return torch.tensor(self.slots, dtype=torch.int32, device=device)


def contiguous(experts: int, ranks: int) -> Placement:
    """Neighbouring experts share a rank; the first `experts % ranks` ranks hold one more."""
    _check(experts, ranks)
    share, extra = divmod(experts, ranks)
    owners = [rank for rank in range(ranks) for _ in range(share + (rank < extra))]
    return Placement(tuple(owners), ranks, "contiguous")


def round_robin(experts: int, ranks: int) -> Placement:
    """Expert e lives on rank e modulo `ranks`: neighbouring (often alike) experts spread out."""
    _check(experts, ranks)
    return Placement(tuple(e % ranks for e in range(experts)), ranks, "round_robin")


def explicit(owners: Sequence[int], ranks: int) -> Placement:
    """Any map: owners[e] is the rank of expert e."""
    return Placement(tuple(int(owner) for owner in owners), ranks, "explicit")


def _check(experts: int, ranks: int) -> None:
    if experts < 1 or ranks < 1:
        raise InputError(f"experts={experts}, ranks={ranks}: both must be at least 1")
