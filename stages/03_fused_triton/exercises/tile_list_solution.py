"""Exercise: the work list of the grouped products, from the counts per expert, in one program.

    python stages/03_fused_triton/exercises/tile_list_skeleton.py     # says what is wrong, or that it is right

Legend: E experts of this rank, BINS a power of two above E, M rows of a tile.
"""

import os
import sys
from typing import Any

if "triton" not in sys.modules:  # a CPU will do: Triton's interpreter runs the kernel as Python
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

from epmoe.fused_triton import interpreter

UNWRITTEN = -7


@triton.jit
def tile_list_kernel(
    counts_ptr, offsets_ptr, tiles_ptr, E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """One program, one lane per expert. Counts (3, 0, 2), BLOCK_M = 2: three tiles, two of expert 0, one of expert 2.

    Write offsets_ptr [E + 1]: where each expert's stretch of the sorted order starts, then where the last one ends.
    Write tiles_ptr [tiles, 3]: (expert, first position, end of this expert's stretch), expert by expert; nothing else.
    """
    # >>> your code
    offs_e = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + offs_e, mask=offs_e < E, other=0)
    end = tl.cumsum(counts, axis=0)
    start = end - counts
    tl.store(offsets_ptr + offs_e, start, mask=offs_e <= E)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    entry = tiles_ptr + (tl.cumsum(tiles, axis=0) - tiles) * 3
    for j in range(tl.max(tiles, axis=0)):
        mask = j < tiles
        tl.store(entry + j * 3, offs_e, mask=mask)
        tl.store(entry + j * 3 + 1, start + j * BLOCK_M, mask=mask)
        tl.store(entry + j * 3 + 2, end, mask=mask)
    # <<< your code


def answer(counts_E: Tensor, block_m: int, room: int) -> tuple[Tensor, Tensor]:
    """Launch one program of the kernel.

    Args:
        counts_E: [E] int32, assignments of every expert.
        block_m: M, rows of a tile.
        room: entries to allocate.

    Returns:
        offsets [E + 1] and tiles [room, 3], both int32; what the kernel did not write is UNWRITTEN.
    """
    experts = len(counts_E)
    offsets = counts_E.new_full((experts + 1,), UNWRITTEN)
    tiles = offsets.new_full((room, 3), UNWRITTEN)
    bins = triton.next_power_of_2(experts + 1)
    sizes: dict[str, Any] = {"E": experts, "BINS": bins, "BLOCK_M": block_m}
    tile_list_kernel[(1,)](counts_E, offsets, tiles, **sizes)
    return offsets, tiles


def check() -> None:
    """The example of the docstring, then a plain loop on uneven counts; every entry past the list stays untouched."""
    device = "cpu" if interpreter.interpreting() else "cuda"
    cases = (([3, 0, 2], 2), ([40, 0, 1, 16, 0, 17], 16), ([0, 0, 0], 16), ([5], 16), ([0, 33], 32))
    for counts, block_m in cases:
        borders = [sum(counts[:e]) for e in range(len(counts) + 1)]
        wanted = [
            [e, first, borders[e + 1]]
            for e in range(len(counts))
            for first in range(borders[e], borders[e + 1], block_m)
        ]
        counts_E = torch.tensor(counts, dtype=torch.int32, device=device)
        offsets, tiles = answer(counts_E, block_m, len(wanted) + 2)
        case = f"counts {counts}, tiles of {block_m} rows"
        assert offsets.tolist() == borders, f"{case}: offsets {offsets.tolist()}, wanted {borders}"
        got, rest = tiles[: len(wanted)].tolist(), tiles[len(wanted) :]
        assert got == wanted, f"{case}: tiles {got}, wanted {wanted}"
        assert (rest == UNWRITTEN).all(), f"{case}: wrote past the list: {rest.tolist()}"


if __name__ == "__main__":
    check()
    print("right")
