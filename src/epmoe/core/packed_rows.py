"""One token in one row of bytes: everything that an owner rank must know travels together, in one exchange.

    | H hidden values | 0-3 pad | K int32 expert slots | K float32 weights | int32 valid | pad to a multiple of 16 |

Worked on the toy (H = 4 in float32, K = 2): 16 bytes of x, 8 of slots, 8 of weights, 4 of valid: 36, padded to 48.
Rows start on 16-byte borders, so that every field of every row can be loaded with wide, aligned loads.

The bits are copied, never converted: dispatch and restore are exact for every dtype.
Source of the idea: the bit-packed dispatch rows of MoEFlow, an unpublished plugin for vLLM; DeepEP's low-latency
messages carry scales the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.core.layer_spec import LayerSpec
from epmoe.core.memory import LayerSize
from epmoe.core.split import Rows
from epmoe.core.workspace import Workspace

ROW_ALIGNMENT = 16
_WORD = 4  # bytes of an int32 and of a float32


@dataclass(frozen=True)
class RowLayout:
    """Where the fields of a packed row lie, in bytes.

    Attributes:
        hidden, topk: H and K.
        dtype: of the hidden values.
    """

    hidden: int
    topk: int
    dtype: torch.dtype

    @property
    def slots_at(self) -> int:
        """First byte of the K slots; hidden values start at 0."""
        return _round_up(self.hidden * self.dtype.itemsize, _WORD)

    @property
    def weights_at(self) -> int:
        """First byte of the K weights."""
        return self.slots_at + self.topk * _WORD

    @property
    def valid_at(self) -> int:
        """First byte of the valid flag."""
        return self.weights_at + self.topk * _WORD

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, padding included."""
        return _round_up(self.valid_at + _WORD, ROW_ALIGNMENT)

    def x(self, rows: Tensor) -> Tensor:
        """Hidden values of rows [..., row_bytes] uint8: a view [..., H] in `dtype`."""
        return rows[..., : self.hidden * self.dtype.itemsize].view(self.dtype)

    def slots(self, rows: Tensor) -> Tensor:
        """Expert slots: a view [..., K] int32."""
        return rows[..., self.slots_at : self.weights_at].view(torch.int32)

    def weights(self, rows: Tensor) -> Tensor:
        """Routing weights: a view [..., K] float32."""
        return rows[..., self.weights_at : self.valid_at].view(torch.float32)

    def unpack(self, rows: Tensor) -> Rows:
        """Views of a packed buffer [..., row_bytes] uint8 as what experts take; the valid flag is not looked at."""
        flat = rows.reshape(-1, self.row_bytes)
        return Rows(x_RH=self.x(flat), slots_RJ=self.slots(flat), weights_RJ=self.weights(flat))

    def valid(self, rows: Tensor) -> Tensor:
        """1 where the row is a token, 0 where it is padding: a view [...] int32."""
        return rows[..., self.valid_at : self.valid_at + _WORD].view(torch.int32)[..., 0]


class PackedBuffers:
    """Where an exchange of packed rows sends from, receives in and brings sums home to, for up to C tokens of a rank.

    Made at once, outside of any graph capture; a call takes the first rows. Layers whose exchanges differ in nothing
    but code may share one workspace.
    """

    def __init__(self, spec: LayerSpec, workspace: Workspace):
        self.layout = RowLayout(spec.shape.hidden, spec.shape.topk, spec.dtype)
        self.ranks, self.capacity, self.device = (
            spec.group.size,
            spec.max_tokens_per_rank,
            spec.device,
        )
        self.workspace = workspace
        self.of(self.capacity)

    def of(self, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """send and recv [EP, C, B] uint8, home [EP, C, H] float32, of a call with this capacity; contiguous."""

        def part(name: str, columns: int, dtype: torch.dtype) -> Tensor:
            shape = (self.ranks * self.capacity, columns)
            whole = self.workspace.buffer(name, shape, dtype, self.device)
            return whole[: self.ranks * capacity].unflatten(0, (self.ranks, capacity))

        row_bytes, hidden = self.layout.row_bytes, self.layout.hidden
        send, recv = (part(name, row_bytes, torch.uint8) for name in ("send", "recv"))
        return send, recv, part("home", hidden, torch.float32)

    @staticmethod
    def nbytes(size: LayerSize) -> int:
        """Bytes of all three for layers of a size."""
        row_bytes = RowLayout(size.shape.hidden, size.shape.topk, size.dtype).row_bytes
        return size.rows("topk") * (2 * row_bytes + 4 * size.shape.hidden)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
