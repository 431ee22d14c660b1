"""Exercise: read vLLM's expert maps. Each rank has one over all E experts: the slot of an expert, -1 if elsewhere.

A stage wants one table for all ranks: who owns expert e, and in which slot.
Legend: E experts, EP ranks.
"""

import torch
from torch import Tensor

from epmoe.core.placement import contiguous, round_robin


def answer(maps_PE: Tensor) -> tuple[Tensor, Tensor]:
    """owner_E [E] int64 and slot_E [E] int64 from maps_PE [EP, E]. No loops.

    Worked: maps (0, 1, -1) and (-1, -1, 0) give owners 0 0 1 and slots 0 1 0.
    """
    # >>> your code
    slot_E, owner_E = maps_PE.max(dim=0)
    return owner_E, slot_E
    # <<< your code


def check() -> None:
    """Compare with the placements that the maps were made from."""
    for placement in (contiguous(8, 3), round_robin(8, 3), contiguous(3, 4), contiguous(5, 1)):
        maps_PE = torch.full((placement.ranks, placement.experts), -1)
        for expert, (owner, slot) in enumerate(zip(placement.owners, placement.slots, strict=True)):
            maps_PE[owner, expert] = slot
        owner_E, slot_E = answer(maps_PE)
        assert owner_E.tolist() == list(placement.owners), (
            f"owners {owner_E.tolist()} of {maps_PE.tolist()}"
        )
        assert slot_E.tolist() == list(placement.slots), (
            f"slots {slot_E.tolist()} of {maps_PE.tolist()}"
        )


if __name__ == "__main__":
    check()
    print("right")
