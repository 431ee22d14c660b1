"""Exercise: what reduce-scatter does, without a network.

After the experts have run, every rank holds one float32 row for every token of every rank: what its own experts owe
that token. Block r of these rows belongs to rank r. Add the blocks up, and hand every rank its own.
Legend: EP ranks, C tokens per rank, H hidden.
"""

import torch
from torch import Tensor


def answer(contributions: list[Tensor], rank: int) -> Tensor:
    """y_CH [C, H]: the sum over all ranks of their block `rank`; contributions[r] is [EP * C, H] of rank r.

    Worked: 2 ranks, C = 1, H = 1, contributions (1, 2) and (10, 20): rank 0 gets 11, rank 1 gets 22.
    """
    # >>> your code
    C = len(contributions[0]) // len(contributions)
    mine = slice(rank * C, (rank + 1) * C)
    total_CH = torch.zeros_like(contributions[0][mine])
    for y_RH in contributions:
        total_CH += y_RH[mine]
    return total_CH
    # <<< your code


def check() -> None:
    """Three ranks of two tokens; block r of rank s holds the number 100 s + 10 r + token."""
    EP, C, H = 3, 2, 4
    contributions = [
        torch.tensor([[100.0 * s + 10 * r + t] * H for r in range(EP) for t in range(C)])
        for s in range(EP)
    ]
    kept = [c.clone() for c in contributions]
    for rank in range(EP):
        y_CH = answer(contributions, rank)
        wanted = [[300.0 + 30 * rank + 3 * t] * H for t in range(C)]
        assert y_CH.tolist() == wanted, f"rank {rank}: {y_CH.tolist()}, wanted {wanted}"
    for s, (now, before) in enumerate(zip(contributions, kept, strict=True)):
        assert torch.equal(now, before), f"the rows of rank {s} were changed"


if __name__ == "__main__":
    check()
    print("right")
