"""One packed row per (token, destination): all that the owner rank needs, in one exchange.

    | H hidden values | K int32 local expert ids | K float32 weights | int32 valid flag | padding to 16 bytes |

Worked on the toy (H = 4, K = 2, bfloat16): hidden 8 bytes, ids at byte 8, weights at 16, flag at 24, 28 bytes padded to
32. Ids start at a multiple of 4 bytes whatever H is, rows at a multiple of 16, so that loads of a row stay wide.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.fused_triton.kernels._checks import need, need_contiguous, need_dtype

_WORD = 4
_ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class RowLayout:
    """Where things are in a packed row. Offsets are in 4-byte words, `bytes` in bytes."""

    hidden: int
    topk: int
    itemsize: int

    @property
    def id_word(self) -> int:
        """First word of the K ids: right behind the hidden values."""
        return -(-self.hidden * self.itemsize // _WORD)

    @property
    def weight_word(self) -> int:
        """First word of the K weights."""
        return self.id_word + self.topk

    @property
    def valid_word(self) -> int:
        """Word of the valid flag: 1 for a token, 0 for an empty row."""
        return self.id_word + 2 * self.topk

    @property
    def bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        used = (self.valid_word + 1) * _WORD
        return -(-used // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @property
    def words(self) -> int:
        """4-byte words of a row."""
        return self.bytes // _WORD

    @property
    def items(self) -> int:
        """Hidden-dtype items of a row: the row stride of the hidden view."""
        return self.bytes // self.itemsize


def row_bytes(hidden: int, topk: int, itemsize: int) -> int:
    """Bytes of one packed row."""
    return RowLayout(hidden, topk, itemsize).bytes


@dataclass(frozen=True)
class RowViews:
    """A packed buffer seen as hidden values, as int32 and as float32 words: three views of the same memory."""

    hidden: Tensor
    ints: Tensor
    floats: Tensor
    layout: RowLayout
    rows: int

    @staticmethod
    def of(buffer: Tensor, hidden: int, topk: int, dtype: torch.dtype) -> "RowViews":
        """View `buffer` [EP, C, row_bytes] (or [R, row_bytes]) uint8. Raises InputError where the size is wrong."""
        layout = RowLayout(hidden, topk, dtype.itemsize)
        need_dtype("packed rows", buffer, torch.uint8)
        need_contiguous(packed_rows=buffer)
        need(
            buffer.shape[-1] == layout.bytes,
            f"packed rows have {buffer.shape[-1]} bytes: expected {layout.bytes} for hidden={hidden}, topk={topk}",
        )
        flat = buffer.view(-1, layout.bytes)
        views = (flat.view(dtype), flat.view(torch.int32), flat.view(torch.float32))
        return RowViews(*views, layout, flat.shape[0])
