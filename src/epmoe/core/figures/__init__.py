"""Pictures of the pages: clean SVG with text as text, the same bytes for the same input.

    from epmoe.core.figures import matrix_picture, ledger_bars, route_picture, buffer_picture
    route_picture(TOY, "reference")            # a notebook shows it; .save("route.svg") or .save("route.png") writes it

Seven colours and no others: a site may swap each for its own in a dark scheme. Fills are translucent shades of them.
Drawn without pyplot, so that nothing depends on a backend or on what was drawn before.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from epmoe.core.errors import InputError

PAPER, INK, MUTED, FAINT = "#ffffff", "#1d2330", "#667085", "#c4cad4"
BLUE, ORANGE, RED = "#2b6cd9", "#c96a10", "#c2334d"
PALETTE = (PAPER, INK, MUTED, FAINT, BLUE, ORANGE, RED)
SMALL, NORMAL, LARGE = 9.0, 10.5, 11.5
OVER_HATCH = {
    "boxstyle": "round,pad=0.2",
    "fc": PAPER,
    "ec": "none",
}  # keeps text on a hatch legible

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "epmoe",
    "font.family": ["DejaVu Sans"],
    "font.size": NORMAL,
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True)
class Picture:
    """A drawn figure with a sentence for readers who cannot see it."""

    figure: Figure
    says: str

    def svg(self) -> str:
        """The figure as an SVG element, without an XML header."""
        text = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(text, format="svg", metadata={"Date": None, "Title": self.says})
        svg = text.getvalue()[text.getvalue().index("<svg") :]
        return svg.replace("<svg ", '<svg role="img" style="max-width: 100%; height: auto" ', 1)

    def save(self, path: str | Path) -> None:
        """Write an .svg or a .png file."""
        if Path(path).suffix == ".svg":
            Path(path).write_text(self.svg())
            return
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(path, dpi=160)

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return f"<picture: {self.says}>"


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of width x height units with its origin at the top left; ten units are an inch."""
    figure = Figure(figsize=(width / 10, height / 10), facecolor=PAPER)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return figure, axes


def write(axes: Axes, x: float, y: float, words: str, **changes) -> None:
    """Text at a point, centred upon it unless told otherwise."""
    style = {"ha": "center", "va": "center", "color": INK, "size": NORMAL}
    axes.text(x, y, words, **{**style, **changes})


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    shade: float = 0.14,
    hatch: bool = False,
) -> None:
    """A rounded box with a pale fill; `hatch` for what is there and not used."""
    style = f"round,pad=0,rounding_size={min(0.7, height / 4)}"
    corner = (x, y)
    axes.add_patch(FancyBboxPatch(corner, width, height, style, fc=color, ec="none", alpha=shade))
    edge = {"fc": "none", "ec": color, "lw": 0.9, "hatch": "////" if hatch else None}
    axes.add_patch(FancyBboxPatch(corner, width, height, style, alpha=0.45 if hatch else 1, **edge))


def matrix_picture(
    matrices: Mapping[str, Sequence[Sequence[float]]],
    unit: str = "rows",
    rows: str = "from rank",
    columns: str = "to rank",
) -> Picture:
    """Who sends how much to whom: one square per scheme, on one scale of shades.

    Args:
        matrices: title -> m[source][owner]. The diagonal stays on its rank and is drawn as an outline.
        unit: of the numbers.
        rows, columns: what the axes are.
    """
    if not matrices:
        raise InputError("no matrix to draw: give at least one title with its numbers")
    size = max(len(m) for m in matrices.values())
    cell, gap, left, top = 5.4, 9.0, 8.0, 9.5
    width = left + len(matrices) * (size * cell + gap) - gap + 4
    figure, axes = canvas(width, top + size * cell + 6)
    most = max((max(map(max, m)) for m in matrices.values()), default=0) or 1
    totals = []
    for number, (title, matrix) in enumerate(matrices.items()):
        x = left + number * (size * cell + gap)
        sent = sum(v for s, row in enumerate(matrix) for d, v in enumerate(row) if s != d)
        totals.append(f"{title}: {_short(sent)} {unit} leave their rank")
        _matrix(axes, x, top, cell, matrix, most)
        middle = x + len(matrix) * cell / 2
        write(axes, middle, 2.4, title, size=LARGE, weight="bold")
        write(axes, middle, 5.2, columns, size=SMALL, color=MUTED)
        note = f"{_short(sent)} {unit} leave"
        write(axes, middle, top + len(matrix) * cell + 2.6, note, color=BLUE, weight="bold")
    write(axes, 2.2, top + size * cell / 2, rows, size=SMALL, color=MUTED, rotation=90)
    return Picture(figure, "; ".join(totals))


def _matrix(axes: Axes, x: float, y: float, cell: float, matrix, most: float) -> None:
    for s, row in enumerate(matrix):
        write(axes, x - 1.4, y + (s + 0.5) * cell, str(s), color=MUTED, size=SMALL)
        for d, value in enumerate(row):
            corner = (x + d * cell + 0.2, y + s * cell + 0.2)
            look = {"fc": BLUE, "ec": "none", "alpha": 0.06 + 0.5 * value / most}
            if s == d:
                look = {"fc": "none", "ec": FAINT, "lw": 1.0}
            axes.add_patch(Rectangle(corner, cell - 0.4, cell - 0.4, **look))
            middle = (x + (d + 0.5) * cell, y + (s + 0.5) * cell)
            write(axes, *middle, _short(value), color=MUTED if s == d else INK)
    for d in range(len(matrix)):
        write(axes, x + (d + 0.5) * cell, y - 1.3, str(d), color=MUTED, size=SMALL)


def ledger_bars(books: Mapping[str, Mapping[str, float]]) -> Picture:
    """What each stage did, one small chart per count, one bar per stage; the last stage is the page's own.

    Args:
        books: stage -> {count's name: value}; the same names for every stage.
    """
    if not books:
        raise InputError("no ledger to draw: give at least one stage with its counts")
    counts = list(next(iter(books.values())))
    for stage, book in books.items():
        if list(book) != counts:
            raise InputError(f"{stage} counts {list(book)}: expected {counts} as the first stage")
    left, panel, gap, row, top = 18.0, 14.5, 4.5, 3.6, 6.0
    width = left + len(counts) * (panel + gap)
    figure, axes = canvas(width, top + len(books) * row + 1.5)
    for number, count in enumerate(counts):
        x = left + number * (panel + gap)
        most = max(book[count] for book in books.values()) or 1
        write(axes, x, 2.6, count, ha="left", weight="bold")
        for place, (stage, book) in enumerate(books.items()):
            y, own = top + place * row, place == len(books) - 1
            length = panel * 0.78 * book[count] / most
            look = {"fc": BLUE if own else MUTED, "ec": "none", "alpha": 0.75 if own else 0.35}
            axes.add_patch(Rectangle((x, y), length, row * 0.62, **look))
            axes.add_patch(
                Rectangle((x - 0.08, y - 0.3), 0.16, row * 0.62 + 0.6, fc=FAINT, ec="none")
            )
            weight = "bold" if own else "normal"
            words = {"ha": "left", "weight": weight, "color": INK}
            write(axes, x + length + 0.7, y + row * 0.31, _short(book[count]), **words)
            if number == 0:
                label = {"ha": "right", "weight": weight, "color": INK if own else MUTED}
                write(axes, left - 1.5, y + row * 0.31, stage, **label)
    spoken = (
        f"{s}: " + ", ".join(f"{n} {_short(v)}" for n, v in b.items()) for s, b in books.items()
    )
    return Picture(figure, "; ".join(spoken))


def _short(value: float) -> str:
    """A number as people write it: whole where it is whole, one place else, thousands apart."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.1f}"
