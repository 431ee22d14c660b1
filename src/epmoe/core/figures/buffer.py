"""The buffers of fixed capacity: one packed row to scale, and send[d, t] beside what arrives from it.

Drawn for a capacity above the toy's own tokens, so that padding rows show. Legend as in `toy`.
"""

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from epmoe.core.errors import InputError
from epmoe.core.figures import (
    BLUE,
    FAINT,
    INK,
    LARGE,
    MUTED,
    NORMAL,
    ORANGE,
    OVER_HATCH,
    RED,
    SMALL,
    Picture,
    box,
    canvas,
    write,
)
from epmoe.core.figures.route import RANK_COLORS, draw_ribbon
from epmoe.core.packed_rows import RowLayout
from epmoe.core.toy import Toy

_CARD, _STEP, _TITLE, _BLOCK_TITLE, _AFTER_BLOCK, _BETWEEN = 3.0, 3.6, 4.2, 2.8, 0.9, 3.0
_LEFT, _RIGHT, _WIDTH = 1.0, 63.0, 38.0


def row_picture(layout: RowLayout) -> Picture:
    """One packed row, byte by byte, to scale."""
    figure, axes = canvas(102, 11.5)
    total, left, width = layout.row_bytes, 3.0, 96.0
    fields = [
        (0, layout.slots_at, f"{layout.hidden} hidden values", BLUE),
        (layout.slots_at, layout.weights_at, f"{layout.topk} slots", ORANGE),
        (layout.weights_at, layout.valid_at, f"{layout.topk} weights", ORANGE),
        (layout.valid_at, layout.valid_at + 4, "valid", RED),
        (layout.valid_at + 4, total, "padding", MUTED),
    ]
    fields = [field for field in fields if field[0] < field[1]]
    write(axes, left, 1.6, f"one packed row: {total} bytes", ha="left", size=LARGE, color=MUTED)
    for begin, end, name, color in fields:
        x, span = left + begin / total * width, (end - begin) / total * width
        unused = name == "padding"
        box(
            axes, x + 0.15, 3.4, span - 0.3, 4.0, color, shade=0.0 if unused else 0.18, hatch=unused
        )
        size = NORMAL if span > 1.2 * len(name) else SMALL
        look = {"color": MUTED, "bbox": OVER_HATCH} if unused else {"color": INK}
        write(axes, x + span / 2, 5.4, name, size=size, **look)
    for edge in (*(field[0] for field in fields), total):
        x = left + edge / total * width
        axes.add_patch(Rectangle((x - 0.06, 7.8), 0.12, 1.0, fc=FAINT, ec="none"))
        write(axes, x, 10.0, str(edge), size=SMALL, color=MUTED)
    spoken = ", ".join(f"{name} from byte {begin}" for begin, _, name, _ in fields)
    return Picture(figure, f"one packed row of {total} bytes: {spoken}")


def buffer_picture(toy: Toy, capacity: int | None = None) -> Picture:
    """The send buffers of all ranks, the receive buffers, and which block goes where.

    Args:
        toy: the routing.
        capacity: C; None for one row more than the fullest rank needs.
    """
    capacity = toy.capacity + 1 if capacity is None else capacity
    if capacity < toy.capacity:
        raise InputError(f"capacity={capacity} is below the {toy.capacity} tokens of a rank")
    block = _BLOCK_TITLE + capacity * _STEP + _AFTER_BLOCK
    height = _TITLE + toy.ranks * block
    tops = [5.0 + rank * (height + _BETWEEN) for rank in range(toy.ranks)]
    figure, axes = canvas(102, tops[-1] + height + 1.0)
    write(axes, _LEFT + _WIDTH / 2, 2.4, "send[d, t]", size=LARGE, color=MUTED)
    write(axes, _RIGHT + _WIDTH / 2, 2.4, "recv[s, t]", size=LARGE, color=MUTED)
    for source in range(toy.ranks):
        for owner in range(toy.ranks):
            start, end = (
                (top + _TITLE + place * block + _BLOCK_TITLE, capacity)
                for top, place in ((tops[source], owner), (tops[owner], source))
            )
            sides = [(y, y + (rows - 1) * _STEP + _CARD) for y, rows in (start, end)]
            bytes_of_block = capacity * _layout(toy).row_bytes
            words = "stays" if source == owner else f"{bytes_of_block} B"
            color, at = RANK_COLORS[source % 2], 0.24
            ends = (_LEFT + _WIDTH, sides[0]), (_RIGHT, sides[1])
            draw_ribbon(axes, *ends, color, words, source == owner, at)
    for rank in range(toy.ranks):
        _buffer(axes, toy, rank, (_LEFT, tops[rank]), capacity, sending=True)
        _buffer(axes, toy, rank, (_RIGHT, tops[rank]), capacity, sending=False)
    rows, used = toy.ranks**2 * capacity, sum(map(len, toy.ids)) * toy.ranks
    says = f"{rows} rows travel, {used} of them tokens, {rows - used} of them padding; capacity {capacity}"
    return Picture(figure, says)


def _layout(toy: Toy) -> RowLayout:
    return RowLayout(toy.shape.hidden, toy.shape.topk, torch.float32)


def _buffer(
    axes: Axes, toy: Toy, rank: int, corner: tuple[float, float], capacity: int, sending: bool
) -> None:
    """One buffer: a block for every other rank, and C rows in each."""
    x, top = corner
    block = _BLOCK_TITLE + capacity * _STEP + _AFTER_BLOCK
    box(axes, x, top, _WIDTH, _TITLE + toy.ranks * block, FAINT, shade=0.12)
    title = {"weight": "bold", "color": RANK_COLORS[rank % 2]}
    write(axes, x + _WIDTH / 2, top + 2.0, f"rank {rank}", **title)
    for other in range(toy.ranks):
        y = top + _TITLE + other * block
        name = f"send[{other}], to rank {other}" if sending else f"recv[{other}], from rank {other}"
        write(axes, x + 1.2, y + 1.2, name, ha="left", size=SMALL, color=MUTED)
        source, owner = (rank, other) if sending else (other, rank)
        for place in range(capacity):
            _row(axes, toy, (source, owner), place, (x + 1.0, y + _BLOCK_TITLE + place * _STEP))


def _row(
    axes: Axes, toy: Toy, pair: tuple[int, int], place: int, corner: tuple[float, float]
) -> None:
    """Row `place` of the block that `source` keeps for `owner`: token, slots there, valid flag."""
    (source, owner), (x, y), width = pair, corner, _WIDTH - 2.0
    tokens = toy.tokens_of(source)
    if place >= len(tokens):
        box(axes, x, y, width, _CARD, MUTED, shade=0.0, hatch=True)
        write(
            axes,
            x + width - 0.9,
            y + _CARD / 2,
            "valid 0",
            ha="right",
            size=SMALL,
            color=RED,
            bbox=OVER_HATCH,
        )
        return
    slots = [
        str(toy.placement.slots[e]) if toy.placement.owners[e] == owner else "-1"
        for e in toy.named_by(tokens[place])
    ]
    box(axes, x, y, width, _CARD, RANK_COLORS[source % 2], shade=0.16)
    middle = y + _CARD / 2
    write(axes, x + 0.9, middle, f"token {tokens[place]}", ha="left")
    idle = all(slot == "-1" for slot in slots)
    words = f"slots {', '.join(slots)}"
    write(axes, x + width * 0.5, middle, words, size=SMALL, color=MUTED if idle else INK)
    write(axes, x + width - 0.9, middle, "valid 1", ha="right", size=SMALL)
