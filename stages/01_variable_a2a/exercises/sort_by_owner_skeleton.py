"""Exercise: what goes where? Order the assignments of one rank by owner and count them.

An all-to-all takes one block of rows per destination rank, the blocks in rank order. So the assignments (t * K + k) are
sorted by the owner of their expert; those that name no expert are left out.
Legend: T tokens, K experts per token, N = T * K assignments, S of them sent, EP ranks, E experts.
"""

import torch
from torch import Tensor

from epmoe.core.placement import round_robin


def answer(ids_TK: Tensor, owner_E: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """order_S [S] int64, assignments by owner and, within an owner, in their old order; counts [EP] int64.

    Worked: 4 experts round robin on 2 ranks, ids (0, 1), (2, -1): owners 0 1 0 none, so order 0 2 1, counts 2 1.
    """
    # >>> your code
    raise NotImplementedError("fill in: order and counts")
    # <<< your code


def check() -> None:
    """Compare with one list per rank."""
    ids_TK = torch.tensor([[0, 1], [2, -1], [5, 5], [-1, -1], [4, 2]], dtype=torch.int32)
    placement = round_robin(6, 3)
    order_S, counts = answer(ids_TK, placement.owner_table(), 3)
    blocks: list[list[int]] = [[], [], []]
    for n, expert in enumerate(ids_TK.flatten().tolist()):
        if expert >= 0:
            blocks[placement.owners[expert]].append(n)
    wanted = [n for block in blocks for n in block]
    assert order_S.tolist() == wanted, f"order {order_S.tolist()}, wanted {wanted}"
    wanted = [len(block) for block in blocks]
    assert counts.tolist() == wanted, f"counts {counts.tolist()}, wanted {wanted}"


if __name__ == "__main__":
    check()
    print("right")
