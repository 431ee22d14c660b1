"""Exercise: add the rows that came home for each token, ranks in ascending order, in float32.

    python stages/03_fused_triton/exercises/merge_skeleton.py     # says what is wrong, or that it is right

Legend: EP ranks, C capacity in tokens, T tokens of this rank, H hidden.
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

BLOCK = 16


@triton.jit
def merge_kernel(
    home_ptr, y_ptr, capacity, EP: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Program (t, j) writes columns j * BLOCK_H on of token t: rank 0's row, plus rank 1's, and so on.

    home_ptr is [EP, capacity, H] float32, y_ptr is [T, H] in any float type; both dense. Add in float32, round once.
    H need not be a multiple of BLOCK_H.
    """
    # >>> your code
    raise NotImplementedError("fill in: the sum over ranks, and its store")
    # <<< your code


def answer(home_DCH: Tensor, y_TH: Tensor) -> Tensor:
    """Launch T programs times as many as cover H. Returns y_TH, written in place."""
    ranks, capacity, hidden = home_DCH.shape
    grid = (len(y_TH), triton.cdiv(hidden, BLOCK))
    sizes: dict[str, Any] = {"EP": ranks, "H": hidden, "BLOCK_H": BLOCK}
    merge_kernel[grid](home_DCH, y_TH, capacity, **sizes)
    return y_TH


def check() -> None:
    """Values that tell the order and the rounding apart, then random ones bit by bit; padding is NaN."""
    device = "cpu" if interpreter.interpreting() else "cuda"

    def merged(values: list[float], dtype: torch.dtype) -> list[float]:
        home_D11 = torch.tensor(values, device=device)[:, None, None]
        return answer(home_D11, torch.empty(1, 1, dtype=dtype, device=device))[0].tolist()

    got = merged([1e8, 1.0, -1e8], torch.float32)
    assert got == [0.0], f"1e8 + 1 - 1e8 in ascending order is 0 in float32, not {got[0]}"
    got = merged([2048.0, 1.0, 1.0], torch.float16)
    assert got == [2050.0], f"2048 + 1 + 1 is 2050 when rounded once, not {got[0]}"
    for ranks, tokens, hidden in ((1, 1, 16), (2, 2, 4), (4, 3, 37)):
        home_DCH = torch.full((ranks, tokens + 1, hidden), float("nan"), device=device)
        home_DCH[:, :tokens] = torch.randn(ranks, tokens, hidden)
        memory = torch.full((tokens + 1, hidden), 7.0, device=device)
        answer(home_DCH, memory[:tokens])
        wanted_TH = home_DCH[0, :tokens]
        for part_TH in home_DCH[1:, :tokens]:
            wanted_TH = wanted_TH + part_TH
        case = f"EP={ranks}, T={tokens}, H={hidden}"
        wrong = (memory[:tokens] != wanted_TH).nonzero().tolist()
        assert not wrong, (
            f"{case}: {len(wrong)} values differ, the first at (token, column) {wrong[0]}"
        )
        assert (memory[tokens] == 7.0).all(), f"{case}: wrote past the last token"


if __name__ == "__main__":
    check()
    print("right")
