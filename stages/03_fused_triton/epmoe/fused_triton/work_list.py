"""Where the work list of the two products lies: in one buffer of the workspace, made once, for the largest call.

A list of its own for every size of call would never end: callers name whatever capacity a batch has. So a call lays
its list out at the front of that buffer, at addresses that depend on its sizes alone, as a captured graph needs.

Sizes are pure Python: what a layer takes is worked out before it is known where its kernels will run.

Legend: N assignments, E_local experts here.
"""

import math

import torch
from torch import Tensor

_ALIGNED = 4  # int32 words: every part begins on 16 bytes, so that it can be loaded with wide, aligned loads


def words(assignments: int, experts: int) -> int:
    """int32 words that hold the list of any call with at most as many assignments, whatever the rows of its tiles.

    Assignments in expert-major order; tiles of at least 16 rows, which each expert rounds up once, four words each;
    counts of blocks of at least 256 assignments, one for every expert and more for a power of two; offsets; and the
    tiles' number.
    """
    tiles = 4 * (assignments // 16 + experts + 1)
    counts = (assignments // 256 + 1) * max(64, 2 * experts)
    return assignments + tiles + counts + (experts + 1) + 1 + 5 * _ALIGNED


class Layout:
    """Lays tensors one after the other into a buffer, with the arguments of `torch.empty`: for `kernels.make_tiles`."""

    def __init__(self, buffer: Tensor):
        self.buffer, self.used = buffer, 0

    def __call__(
        self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The next part, uninitialised; `dtype` and `device` are the buffer's."""
        begin, size = self.used, math.prod(shape)
        self.used += -(-size // _ALIGNED) * _ALIGNED
        return self.buffer[begin : begin + size].view(shape)
