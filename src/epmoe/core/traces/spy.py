"""Watch one call of a split layer: what its exchanges carried, what its experts got and gave. Nothing is computed here.

The layer runs as it is. Its group and its experts are watched from outside, tensors are copied as they pass, and a
message is read off the very buffer that travelled.

Legend: EP ranks, H hidden, K experts per token, R received rows, J places of a row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epmoe.core.layer import MoELayer
from epmoe.core.packed_rows import RowLayout
from epmoe.core.split import Rows, SplitLayer


@dataclass(frozen=True, kw_only=True)
class Carried:
    """One exchange as this rank saw it.

    Attributes:
        name: all_gather, reduce_scatter or all_to_all.
        sent: what this rank put in, a copy.
        send_counts: rows of dim 0 for each rank; None where all blocks are equal.
    """

    name: str
    sent: Tensor
    send_counts: list[int] | None


@dataclass
class Watched:
    """Everything that passed: exchanges in order, the rows that the experts got, and what they gave back."""

    carried: list[Carried] = field(default_factory=list)
    rows: Rows | None = None
    y_RH: Tensor | None = None

    def hidden(self, hidden: int, width: int) -> list[Carried]:
        """Exchanges whose rows hold hidden values: [.., H] floats, or [.., width] packed bytes."""
        wanted = (("f", hidden), ("b", width))
        return [c for c in self.carried if c.sent.dim() > 1 and _row_shape(c.sent) in wanted]


def _row_shape(x: Tensor) -> tuple[str, int]:
    return ("b" if x.dtype is torch.uint8 else "f" if x.is_floating_point() else "i"), x.shape[-1]


@contextmanager
def watch(layer: MoELayer) -> Iterator[Watched]:
    """Copy what passes through `layer`, which must be split, until the block ends."""
    assert isinstance(layer, SplitLayer), "only a split layer has rows to show"
    seen, group, experts = Watched(), layer.spec.group, layer.experts
    names = ("all_gather", "reduce_scatter", "all_to_all")
    kept = {name: getattr(group, name) for name in names}

    def spy(name: str) -> Any:
        def carry(out: Tensor, x: Tensor, recv_counts=None, send_counts=None) -> None:
            counts = None if send_counts is None else [int(n) for n in send_counts]
            seen.carried.append(Carried(name=name, sent=x.clone(), send_counts=counts))
            arguments = () if name != "all_to_all" else (recv_counts, send_counts)
            kept[name](out, x, *arguments)

        return carry

    def compute(rows: Rows) -> Tensor:
        y_RH = experts(rows)
        seen.rows = rows.clone()
        seen.y_RH = y_RH.clone()
        return y_RH

    for name in names:
        setattr(group, name, spy(name))
    setattr(layer, "experts", compute)  # noqa: B010  for this one call; no part, only a function
    try:
        yield seen
    finally:
        for name in names:
            delattr(group, name)
        layer.experts = experts


@dataclass(frozen=True, kw_only=True)
class Message:
    """One row on its way: from this rank to rank `to`, the `index`-th of its block.

    Attributes:
        to, index: where it goes, and its place among the rows that this rank sends there.
        x_H: its hidden values, float32.
        padding: the buffer says that nobody is to look at it; None where the buffer does not say.
    """

    to: int
    index: int
    x_H: Tensor
    padding: bool | None = None


def messages(carried: Carried, ranks: int, layout: RowLayout) -> list[Message]:
    """The rows of one exchange, read off its send buffer.

    Blocks lie in rank order: as many rows as `send_counts` says, else equal ones; an all-gather sends all its rows to
    everybody.
    """
    rows = carried.sent.reshape(-1, carried.sent.shape[-1])
    packed = rows.dtype is torch.uint8
    x_RH = (layout.x(rows) if packed else rows).float()
    dead = (layout.valid(rows) != 1).tolist() if packed else None
    found = []
    for to in range(ranks):
        for index, row in enumerate(_block(carried, len(rows), ranks, to)):
            padding = dead[row] if dead else None
            found.append(Message(to=to, index=index, x_H=x_RH[row], padding=padding))
    return found


def _block(carried: Carried, rows: int, ranks: int, to: int) -> range:
    if carried.name == "all_gather":
        return range(rows)
    if carried.send_counts is None:
        return range(to * (rows // ranks), (to + 1) * (rows // ranks))
    start = sum(carried.send_counts[:to])
    return range(start, start + carried.send_counts[to])
