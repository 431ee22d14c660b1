"""Plots of results, in the style of `epmoe.core.figures`.

Each carries a digest of what it shows, so that a stale one is told from one that another matplotlib drew a little
differently.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from epmoe.core.bench.padding import PaddingRow
from epmoe.core.bench.results import Result, compared, timed_subjects
from epmoe.core.bench.view import routing_words
from epmoe.core.figures import BLUE, FAINT, INK, MUTED, NORMAL, ORANGE, PAPER, RED, SMALL, Picture

# what a reader looks for is blue; opponents are warm
_LOOKS = {
    "vllm-default": (ORANGE, "--", "s"),
    "vllm-tuned": (ORANGE, "-", "s"),
    "vllm-agrs": (ORANGE, "--", "s"),
    "vllm-agrs-tuned": (ORANGE, "-", "s"),
    "grouped_mm": (RED, "-", "^"),
}
# no two of as many stages and ablations as a run compares look alike
_STAGE_LOOKS = [
    (color, line, marker) for marker in "osD^" for color in (BLUE, MUTED) for line in "-:"
]
_DIGEST = "<!-- shows {} -->"


def looks(names: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, line and marker of every subject; the last stage is the page's own."""
    stages = [name for name in reversed(names) if name not in _LOOKS]
    stages.sort(key=lambda name: ":" in name)  # rungs before a rung's ablations
    ours = dict(zip(stages, itertools.cycle(_STAGE_LOOKS), strict=False))
    return {name: _LOOKS.get(name) or ours[name] for name in names}


def with_digest(picture: Picture, shown: object) -> str:
    """The SVG, and behind it the digest of what it shows and of the code that drew it."""
    text = json.dumps(shown, sort_keys=True, default=str) + Path(__file__).read_text()
    return (
        picture.svg().rstrip()
        + "\n"
        + _DIGEST.format(hashlib.sha256(text.encode()).hexdigest())
        + "\n"
    )


def digest_of(svg: str) -> str:
    """The last line: two plots of the same numbers by the same code share it."""
    return svg.rstrip().rsplit("\n", 1)[-1]


def floor_plot(result: Result) -> str:
    """Time / floor over T, a line per subject, with its 95% interval."""
    lines = {
        name: [
            (point.tokens, *one.over_floor)
            for point in result.points
            if (one := point.subjects.get(name)) and one.over_floor
        ]
        for name in dict.fromkeys(n for p in result.points for n in timed_subjects(p))
    }
    figure, axes = _axes("tokens per rank", "time / floor")
    axes.axhline(1.0, color=MUTED, lw=0.9)
    for name, look in looks(list(lines)).items():
        _line(axes, name, lines[name], look)
    axes.set_xscale("log", base=2)
    _ticks(axes, sorted({int(t) for line in lines.values() for t, *_ in line}))
    _legend(figure)
    spoken = (
        f"{n}: " + ", ".join(f"{v:.2f} at T={t}" for t, v, *_ in line) for n, line in lines.items()
    )
    return with_digest(Picture(figure, "time over floor. " + "; ".join(spoken)), lines)


def ratio_plot(result: Result, ours: str) -> str:
    """Time of `ours` over every other subject's, with its 95% interval; below 1 it is faster."""
    lines: dict[str, list[tuple]] = {}
    for point in result.points:
        for other in timed_subjects(point):
            if found := compared(point, ours, other):
                row = (point.tokens, found.median, found.low, found.high)
                lines.setdefault(other, []).append(row)
    figure, axes = _axes("tokens per rank", f"{ours} / other")
    axes.axhline(1.0, color=MUTED, lw=0.9)
    for name, look in looks(list(lines)).items():
        _line(axes, f"against {name}", lines[name], look)
    axes.set_xscale("log", base=2)
    _ticks(axes, sorted({int(t) for line in lines.values() for t, *_ in line}))
    _legend(figure)
    spoken = (
        f"{n}: " + ", ".join(f"{v:.3f} at T={t}" for t, v, *_ in line) for n, line in lines.items()
    )
    return with_digest(Picture(figure, f"{ours} over others. " + "; ".join(spoken)), [ours, lines])


def padding_plot(rows: Sequence[PaddingRow], ep: int) -> str:
    """Rows computed per row needed over T for uniform routing, a line per stage."""
    shown = [r for r in rows if r.ep == ep and routing_words(r) == rows[0].routing]
    stages = list(dict.fromkeys(row.stage for row in shown))
    lines = {
        stage: [
            (r.tokens, r.computed_ratio, r.computed_ratio, r.computed_ratio)
            for r in shown
            if r.stage == stage and r.computed_ratio is not None
        ]
        for stage in stages
    }
    figure, axes = _axes("tokens per rank", "rows computed / rows needed")
    axes.axhline(1.0, color=MUTED, lw=0.9)
    for name, look in looks(stages).items():
        _line(axes, name, lines[name], look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _ticks(axes, sorted({r.tokens for r in shown}))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _legend(figure)
    spoken = (
        f"{n}: " + ", ".join(f"{v:.1f} at T={t}" for t, v, *_ in line) for n, line in lines.items()
    )
    return with_digest(Picture(figure, "rows computed per row needed. " + "; ".join(spoken)), lines)


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.6), facecolor=PAPER, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor(PAPER)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=MUTED, labelsize=SMALL, which="both")
    axes.grid(axis="y", color=FAINT, lw=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, color=INK, size=NORMAL)
    axes.set_ylabel(y, color=INK, size=NORMAL)
    return figure, axes


def _line(axes: Axes, name: str, points: Sequence[tuple], look: tuple[str, str, str]) -> None:
    color, style, marker = look
    x, middle, low, high = zip(*points, strict=True)
    axes.fill_between(x, low, high, color=color, alpha=0.14, lw=0)
    axes.plot(
        x, middle, color=color, ls=style, marker=marker, ms=4, mfc=PAPER if style != "-" else color,
        lw=1.6, label=name,
    )  # fmt: skip


def _ticks(axes: Axes, tokens: Sequence[int]) -> None:
    axes.set_xticks(list(tokens), [str(t) for t in tokens])
    axes.minorticks_off()


def _legend(figure: Figure) -> None:
    """Above the axes, where no line runs."""
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=SMALL, labelcolor=INK)
