"""Exercise: whose work is it? Turn global expert ids into slots of one rank.

Every rank has everybody's ids. It must find its own experts among them, as slots of its weight tensors, and mark all
else with -1: the experts of other ranks, and ids that name no expert (-1, or E and more).
Legend: R rows, K experts per token, E experts.
"""

import torch
from torch import Tensor

from epmoe.core.placement import contiguous, round_robin


def answer(ids_RK: Tensor, owner_E: Tensor, slot_E: Tensor, rank: int) -> Tensor:
    """slots_RK [R, K]: the slot where `rank` owns the expert, -1 everywhere else. No loops, no host reads.

    Worked: 4 experts on 2 ranks, ids (0, 2) and (3, -1), seen by rank 1: (-1, 0) and (1, -1).
    """
    # >>> your code
    real_RK = (ids_RK >= 0) & (ids_RK < len(owner_E))
    safe_RK = torch.where(real_RK, ids_RK, 0).long()
    mine_RK = real_RK & (owner_E[safe_RK] == rank)
    return torch.where(mine_RK, slot_E[safe_RK], -1)
    # <<< your code


def check() -> None:
    """Compare with two plain loops, for two maps and both ranks."""
    ids_RK = torch.tensor([[0, 2], [3, -1], [1, 1], [4, 2], [9, 0]], dtype=torch.int32)
    for placement in (contiguous(4, 2), round_robin(4, 2)):
        for rank in range(2):
            slots_RK = answer(ids_RK, placement.owner_table(), placement.slot_table(), rank)
            wanted = [
                [
                    placement.slots[e] if 0 <= e < 4 and placement.owners[e] == rank else -1
                    for e in row
                ]
                for row in ids_RK.tolist()
            ]
            assert slots_RK.tolist() == wanted, (
                f"{placement.kind}, rank {rank}: {slots_RK.tolist()}, wanted {wanted}"
            )


if __name__ == "__main__":
    check()
    print("right")
