"""Exercise: a list of blocks whose length the host knows, over experts whose lengths it does not.

    python stages/02_fixed_capacity/exercises/block_map_skeleton.py     # says what is wrong, or that it is right

Legend: N assignments, M rows of a block, B blocks, E_local experts of this rank.
"""

import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.fixed_capacity import experts as stage


def answer(offsets: Tensor, assignments: int, rows: int) -> tuple[Tensor, Tensor]:
    """Cut every expert's stretch of the sorted order into blocks of `rows`; the last of an expert may not be full.

    Worked for offsets 0 2 2 5 (experts with 2, 0 and 3 assignments), N = 6 and blocks of 2 rows: blocks (0 1), (2 3),
    (4 .) of experts 0, 2, 2; then 3 unused ones, since min(6, 6 // 2 + 3) = 6.

    Args:
        offsets: [E_local + 1] int32: expert e has places offsets[e] to offsets[e + 1] - 1.
        assignments: N.
        rows: M.

    Returns:
        expert_B [B] int32 (any expert for an unused block) and place_BM [B, M] int64, -1 where there is no row;
        B = min(N, N // M + E_local). The host must not read a tensor.
    """
    # >>> your code
    raise NotImplementedError("fill in: the expert and the places of every block")
    # <<< your code


def check() -> None:
    """The worked example, the stage's own map on uneven counts, and no read of a device value."""
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    with ledger.record() as book:
        expert_B, place_BM = answer(offsets, 6, 2)
    assert place_BM.tolist()[:3] == [[0, 1], [2, 3], [4, -1]], f"places are {place_BM.tolist()}"
    assert expert_B.tolist()[:3] == [0, 2, 2], f"experts are {expert_B.tolist()}"
    assert (place_BM[3:] == -1).all(), f"unused blocks hold rows: {place_BM[3:].tolist()}"
    assert not book.host_syncs, f"the host read a device value: {dict(book.host_syncs)}"
    for counts in ([40, 0, 1, 16, 0, 17], [0, 0, 0], [5], [0, 33, 0]):
        total = sum(counts) + 3  # three assignments without an expert
        offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        _, wanted_BM = stage.block_map(offsets, total)
        expert_B, place_BM = answer(offsets, total, stage.BLOCK)
        assert torch.equal(place_BM, wanted_BM), f"places for counts {counts}"
        for expert, places in zip(expert_B.tolist(), place_BM.tolist(), strict=True):
            low, high = offsets[expert], offsets[expert + 1]
            assert all(p == -1 or low <= p < high for p in places), f"experts for counts {counts}"


if __name__ == "__main__":
    check()
    print("right")
