"""Bytes on the wire of four ways to bring tokens to their experts and back.

What leaves a rank for OTHER ranks is counted; what it keeps is not. One row is one token's data in one message:

| scheme         | rows from s to d                       | dispatch row                                      |
|----------------|----------------------------------------|---------------------------------------------------|
| all_gather     | T (the longest rank's, for all)        | hidden, K ids int32, K weights float32            |
| variable       | one per assignment                     | hidden, one id int32, one weight float32          |
| dedup          | one per token that hits d              | hidden, K ids int32, K weights float32            |
| fixed_capacity | C, always                              | the same and a flag int32, padded to 16 bytes     |

Every row that went out comes back as one row of H values (all_gather: the parts that reduce-scatter adds up), so the
matrix of combine rows is the transposed matrix of dispatch rows. They come back in float32, as the stages here send
them, unless told otherwise. The counts that a variable exchange sends first (8 bytes a peer) are left out.

Legend as in `plan.load`; C capacity in tokens per rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from epmoe.core.errors import InputError
from epmoe.core.packed_rows import RowLayout
from epmoe.core.plan.load import Load, Matrix
from epmoe.core.shape import MoEShape
from epmoe.core.values import DTYPES, check_whole

ID_BYTES = 4
WEIGHT_BYTES = 4
FLAG_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What one scheme sends for one layer call.

    Attributes:
        scheme: one of SCHEMES.
        dispatch_row_bytes, combine_row_bytes: size of one row each way.
        dispatch_row, combine_row: what a row holds, in words.
        dispatch_bytes, combine_bytes: bytes that leave every rank for other ranks.
        dispatch_peak_bytes, combine_peak_bytes: the most that any one rank sends or receives.
        rows_sent: dispatch rows that leave all ranks.
        rows_needed: (token, other rank) pairs where the token names an expert of that rank.
    """

    scheme: str
    dispatch_row_bytes: int
    combine_row_bytes: int
    dispatch_row: str
    combine_row: str
    dispatch_bytes: tuple[float, ...]
    combine_bytes: tuple[float, ...]
    dispatch_peak_bytes: float
    combine_peak_bytes: float
    rows_sent: float
    rows_needed: float

    @property
    def rows_per_needed(self) -> float:
        """Rows sent over rows needed, 1 is ideal: padding, tokens nobody asked for, and repeated tokens."""
        if self.rows_needed:
            return self.rows_sent / self.rows_needed
        return float("inf") if self.rows_sent else 1.0

    def seconds(self, link_bandwidth: float) -> float:
        """Least time of both exchanges, in seconds, over links of `link_bandwidth` bytes/s per direction."""
        return (self.dispatch_peak_bytes + self.combine_peak_bytes) / link_bandwidth


def wire_bytes(
    scheme: str,
    shape: MoEShape,
    load: Load,
    *,
    dtype: str = "bfloat16",
    combine_dtype: str = "float32",
    capacity: int | None = None,
) -> Wire:
    """Bytes of `scheme` for one layer call under `load`.

    Args:
        scheme: all_gather, variable, dedup or fixed_capacity.
        shape: gives H and K.
        load: from `drawn_load` (exact) or `expected_load`.
        dtype: of the hidden states on the way out, by its name in `epmoe.core.values.DTYPES`.
        combine_dtype: of the rows on the way back.
        capacity: C of fixed_capacity; None for the longest rank's T.

    Raises InputError for an unknown scheme or dtype, and for a capacity below T.
    """
    if scheme not in SCHEMES:
        raise InputError(f"no scheme is called {scheme!r}: choose one of {', '.join(SCHEMES)}")
    row_bytes, row = _dispatch_row(scheme, shape, dtype)
    back_bytes = shape.hidden * item_bytes(combine_dtype)
    rows_SD = _without_diagonal(SCHEMES[scheme](load, _capacity(load, capacity)))
    needed_SD = _without_diagonal(load.hits_SD)
    sent = [sum(row_of_s) for row_of_s in rows_SD]
    received = [sum(column) for column in zip(*rows_SD, strict=True)]
    most_rows = max(sent + received)
    return Wire(
        scheme=scheme,
        dispatch_row_bytes=row_bytes,
        combine_row_bytes=back_bytes,
        dispatch_row=row,
        combine_row=f"{shape.hidden} x {combine_dtype}",
        dispatch_bytes=tuple(rows * row_bytes for rows in sent),
        combine_bytes=tuple(rows * back_bytes for rows in received),
        dispatch_peak_bytes=most_rows * row_bytes,
        combine_peak_bytes=most_rows * back_bytes,
        rows_sent=sum(sent),
        rows_needed=sum(sum(row_of_s) for row_of_s in needed_SD),
    )


def item_bytes(dtype: str) -> int:
    """Bytes of one value. Raises InputError for an unknown dtype."""
    return _torch_dtype(dtype).itemsize


def _torch_dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown here: choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _dispatch_row(scheme: str, shape: MoEShape, dtype: str) -> tuple[int, str]:
    """Bytes of one row on the way out, and what it holds."""
    hidden, topk = shape.hidden * item_bytes(dtype), shape.topk
    text = f"{shape.hidden} x {dtype}"
    if scheme == "variable":
        return hidden + ID_BYTES + WEIGHT_BYTES, f"{text}, id, weight"
    used = hidden + topk * (ID_BYTES + WEIGHT_BYTES)
    text = f"{text}, {topk} ids, {topk} weights"
    if scheme != "fixed_capacity":
        return used, text
    packed = RowLayout(shape.hidden, topk, _torch_dtype(dtype)).row_bytes
    return packed, f"{text}, flag, {packed - used - FLAG_BYTES} B of padding"


def _full(load: Load, rows: float) -> Matrix:
    return tuple((rows,) * len(load.tokens) for _ in load.tokens)


# every scheme: (load, capacity) -> rows_SD, diagonal included
SCHEMES: dict[str, Callable[[Load, int], Matrix]] = {
    "all_gather": lambda load, capacity: _full(load, max(load.tokens)),
    "variable": lambda load, capacity: load.slots_SD,
    "dedup": lambda load, capacity: load.hits_SD,
    "fixed_capacity": lambda load, capacity: _full(load, capacity),
}


def _without_diagonal(rows_SD: Matrix) -> Matrix:
    return tuple(
        tuple(0 if s == d else rows for d, rows in enumerate(row)) for s, row in enumerate(rows_SD)
    )


def _capacity(load: Load, capacity: int | None) -> int:
    longest = max(load.tokens)
    if capacity is None:
        return longest
    check_whole("capacity", capacity, longest)  # the tokens of the fullest rank have to fit
    return capacity
