"""Where the rows of the toy go: out to the owner ranks, and home, with the bytes on every way.

`parcels` says in plain Python what each scheme delivers; the tests hold it against what the stages really deliver.
Legend as in `toy`: s source rank, d owner rank.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from epmoe.core.errors import InputError
from epmoe.core.figures import (
    BLUE,
    FAINT,
    INK,
    LARGE,
    MUTED,
    ORANGE,
    OVER_HATCH,
    SMALL,
    Picture,
    box,
    canvas,
    write,
)
from epmoe.core.packed_rows import RowLayout
from epmoe.core.toy import Toy

RANK_COLORS = (BLUE, ORANGE)
_WORD = 4  # bytes of an id, a slot, a weight, a float32


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One row that an owner rank receives: a token, and the experts there that want it (none: it came for nothing)."""

    token: int
    source: int
    experts: tuple[int, ...]


def parcels(toy: Toy, stage: str) -> list[list[Parcel]]:
    """parcels[d]: the rows that owner rank d receives, in order of arrival."""
    one_per_assignment = _scheme(stage) == "variable"
    received: list[list[Parcel]] = [[] for _ in range(toy.ranks)]
    for owner, rows in enumerate(received):
        for source in range(toy.ranks):
            for token in toy.tokens_of(source):
                here = tuple(e for e in toy.named_by(token) if toy.placement.owners[e] == owner)
                groups = [(e,) for e in here] if one_per_assignment else [here]
                rows += [Parcel(token=token, source=source, experts=g) for g in groups]
    return received


def row_bytes(toy: Toy, stage: str) -> tuple[int, int]:
    """Bytes of one float32 row out (hidden values and routing) and of one row home (a float32 sum)."""
    hidden, topk = toy.shape.hidden, toy.shape.topk
    out = {
        "gather": hidden * _WORD + topk * 2 * _WORD,
        "variable": hidden * _WORD + 2 * _WORD,
        "fixed": RowLayout(hidden, topk, torch.float32).row_bytes,
    }[_scheme(stage)]
    return out, hidden * _WORD


def rows_sent(toy: Toy, stage: str) -> list[list[int]]:
    """rows[s][d]: how many rows source s sends to owner d."""
    received = parcels(toy, stage)
    return [
        [sum(p.source == s for p in received[d]) for d in range(toy.ranks)]
        for s in range(toy.ranks)
    ]


def _scheme(stage: str) -> str:
    schemes = {"reference": "gather", "variable_a2a": "variable", "fixed_capacity": "fixed"}
    if stage not in schemes:
        raise InputError(f"no route of {stage!r} is known here: choose one of {', '.join(schemes)}")
    return schemes[stage]


_CARD, _STEP, _TITLE, _BETWEEN = 3.2, 3.9, 4.4, 3.0
_COLUMNS = (
    (1.0, 20.0),
    (43.0, 24.0),
    (89.0, 12.0),
)  # left edge and width: tokens, received rows, results


def route_picture(toy: Toy, stage: str) -> Picture:
    """The toy moving through one layer call: tokens, rows at the owner ranks, sums on their way home."""
    received, sent = parcels(toy, stage), rows_sent(toy, stage)
    out, home = row_bytes(toy, stage)
    heights = [_height(max(len(rows), len(toy.ids[r]))) for r, rows in enumerate(received)]
    tops = [5.0 + sum(heights[:r]) + r * _BETWEEN for r in range(toy.ranks)]
    outer = [
        t + (h - _height(len(toy.ids[r]))) / 2
        for r, (t, h) in enumerate(zip(tops, heights, strict=True))
    ]
    figure, axes = canvas(102, tops[-1] + heights[-1] + 1.0)
    titles = ("tokens at source ranks", "rows at owner ranks", "sums at home")
    for (x, width), title in zip(_COLUMNS, titles, strict=True):
        write(axes, x + width / 2, 2.4, title, size=LARGE, color=MUTED)
    for left, right, step in zip(
        _COLUMNS[:2], _COLUMNS[1:], ("dispatch \u2192", "combine \u2192"), strict=True
    ):
        write(axes, (sum(left) + right[0]) / 2, 2.4, step, size=LARGE, weight="bold")
    for source in range(toy.ranks):
        for owner in range(toy.ranks):
            _ribbons(
                axes,
                received,
                sent,
                (outer, tops),
                (source, owner),
                (out, home),
                len(toy.ids[source]),
            )
    for rank in range(toy.ranks):
        _cards_of_tokens(axes, toy, rank, outer[rank])
        _cards_of_rows(axes, toy, rank, received[rank], tops[rank])
    wire = sum(sent[s][d] for s in range(toy.ranks) for d in range(toy.ranks) if s != d)
    idle = sum(not p.experts for rows in received for p in rows)
    says = (
        f"{stage}: {wire} rows of {out} bytes cross between ranks and as many of {home} bytes come home; "
        f"{idle} of {sum(map(len, received))} received rows name no expert there"
    )
    return Picture(figure, says)


def _height(rows: int) -> float:
    return _TITLE + rows * _STEP + 0.8


def _cards_of_tokens(axes: Axes, toy: Toy, rank: int, top: float) -> None:
    """A source rank before the layer, and after it."""
    color = RANK_COLORS[rank % 2]
    for column in (0, 2):
        _frame(axes, column, top, _height(len(toy.ids[rank])), f"rank {rank}", color)
    for place, token in enumerate(toy.tokens_of(rank)):
        y, names = _row_top(top, place), ", ".join(map(str, toy.named_by(token)))
        _card(axes, 0, y, color, f"token {token}", f"names {names}")
        _card(axes, 2, y, color, f"y[{token}]", "")


def _cards_of_rows(axes: Axes, toy: Toy, rank: int, received: list[Parcel], top: float) -> None:
    """An owner rank and what it received, in the colour of the rank that sent it."""
    owned = ", ".join(map(str, toy.placement.experts_of(rank)))
    title = f"rank {rank} owns {owned}"
    _frame(axes, 1, top, _height(len(received)), title, RANK_COLORS[rank % 2])
    for place, parcel in enumerate(received):
        used, wanted = bool(parcel.experts), ", ".join(map(str, parcel.experts))
        color = RANK_COLORS[parcel.source % 2] if used else MUTED
        note = (
            f"for {'experts' if len(parcel.experts) > 1 else 'expert'} {wanted}"
            if used
            else "for nobody"
        )
        _card(axes, 1, _row_top(top, place), color, f"token {parcel.token}", note, used)


def _frame(axes: Axes, column: int, top: float, height: float, title: str, color: str) -> None:
    x, width = _COLUMNS[column]
    box(axes, x, top, width, height, FAINT, shade=0.12)
    write(axes, x + width / 2, top + 2.2, title, weight="bold", color=color)


def _card(
    axes: Axes, column: int, y: float, color: str, name: str, note: str, used: bool = True
) -> None:
    x, width = _COLUMNS[column][0] + 0.9, _COLUMNS[column][1] - 1.8
    box(axes, x, y, width, _CARD, color, shade=0.16 if used else 0.0, hatch=not used)
    ink = INK if used else MUTED
    if not note:
        write(axes, x + width / 2, y + _CARD / 2, name, color=ink)
        return
    patch = {} if used else {"bbox": OVER_HATCH}
    write(axes, x + 0.9, y + _CARD / 2, name, ha="left", color=ink, **patch)
    write(axes, x + width - 0.9, y + _CARD / 2, note, ha="right", size=SMALL, color=ink, **patch)


def _row_top(top: float, place: int) -> float:
    return top + _TITLE + place * _STEP


def _ribbons(
    axes: Axes, received: list[list[Parcel]], sent: list[list[int]], tops, pair, sizes, tokens: int
) -> None:
    """The way out from source to owner, and the way home, as wide as they have rows."""
    source, owner = pair
    count = sent[source][owner]
    if not count:
        return
    there = [i for i, p in enumerate(received[owner]) if p.source == source]
    middle = (_row_top(tops[1][owner], there[0]), _row_top(tops[1][owner], there[-1]) + _CARD)
    outer = _share(sent[source], owner, tops[0][source], tokens)
    color, stays = RANK_COLORS[source % 2], source == owner
    left, right = [c[0] for c in _COLUMNS], [c[0] + c[1] for c in _COLUMNS]
    words = [f"{count} {'row' if count == 1 else 'rows'}, {count * size} B" for size in sizes]
    if stays:
        words = [f"{count} {'stays' if count == 1 else 'stay'}"] * 2
    draw_ribbon(axes, (right[0], outer), (left[1], middle), color, words[0], stays, 0.27)
    draw_ribbon(axes, (right[1], middle), (left[2], outer), color, words[1], stays, 0.73)


def _share(row: list[int], owner: int, top: float, tokens: int) -> tuple[float, float]:
    """The part of a source rank's edge that its rows to `owner` leave from."""
    span, start = (tokens - 1) * _STEP + _CARD, top + _TITLE
    begin, end = sum(row[:owner]) / sum(row), sum(row[: owner + 1]) / sum(row)
    return start + begin * span, start + end * span


def draw_ribbon(axes: Axes, start, end, color: str, words: str, stays: bool, at: float) -> None:
    """A band between two upright edges (x, (top, bottom)), labelled at a part of its way."""
    (x0, (a0, b0)), (x1, (a1, b1)) = start, end
    bend = (x0 + x1) / 2
    there, back = (
        [(x0, a0), (bend, a0), (bend, a1), (x1, a1)],
        [(x1, b1), (bend, b1), (bend, b0), (x0, b0)],
    )
    codes = [Outline.MOVETO, *[Outline.CURVE4] * 3, Outline.LINETO, *[Outline.CURVE4] * 3]
    look = {"fc": color, "ec": "none", "alpha": 0.10 if stays else 0.28}
    axes.add_patch(PathPatch(Outline(there + back, codes), **look))
    along = 1.5 * at * (1 - at) + at**3  # x of the cubic, whose inner points lie halfway
    down = 3 * at**2 * (1 - at) + at**3
    y = (a0 + b0) / 2 + ((a1 + b1) - (a0 + b0)) / 2 * down
    look = {"color": MUTED} if stays else {"color": INK, "weight": "bold"}
    write(axes, x0 + (x1 - x0) * along, y, words, size=SMALL, **look)
