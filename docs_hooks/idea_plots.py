"""Plots of the idea pages that show computed numbers, rather than a scheme."""

import itertools

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from epmoe.core.figures import BLUE, FAINT, INK, MUTED, ORANGE, PAPER, RED, SMALL, Picture
from epmoe.core.plan import plan
from epmoe.core.shape import SHAPES

Drawn = tuple[Picture, str]


def _plain(axes: Axes) -> None:
    axes.set_facecolor(PAPER)
    axes.tick_params(colors=MUTED, labelsize=SMALL)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def memory_floor() -> Drawn:
    """The least time of one layer over T."""
    shape, gpu, ep = SHAPES["glm-5.3-flash"], "h200", 4
    tokens = [2**p for p in range(14)]
    ranks = [plan(shape, ep, t, gpu).slowest for t in tokens]
    memory = [r.floor.memory_seconds * 1e6 for r in ranks]
    compute = [r.floor.compute_seconds * 1e6 for r in ranks]
    figure = Figure(figsize=(7.2, 3.7), facecolor=PAPER)
    axes = figure.add_axes((0.1, 0.15, 0.87, 0.80))
    _plain(axes)
    axes.loglog(tokens, memory, color=BLUE, lw=2)
    axes.loglog(tokens, compute, color=ORANGE, lw=2)
    axes.fill_between(
        tokens,
        [max(m, c) for m, c in zip(memory, compute, strict=True)],
        0.5,
        color=FAINT,
        alpha=0.25,
        lw=0,
    )
    axes.set_ylim(0.9, max(compute) * 1.6)
    axes.set_xlim(1, tokens[-1])
    axes.set_xticks(tokens[::2], [str(t) for t in tokens[::2]])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("T, tokens on each rank", color=INK)
    axes.set_ylabel("µs for one layer, at least", color=INK)
    axes.text(4, memory[2] * 0.45, "read the active experts", color=BLUE, weight="bold", size=9)
    axes.text(9, compute[3] * 0.42, "multiply", color=ORANGE, weight="bold", size=9)
    axes.text(60, 2.2, "out of reach", color=MUTED, size=9, ha="center")
    words = ", ".join(
        f"T={t}: {r.floor.seconds * 1e6:,.0f} µs ({r.floor.bound})"
        for t, r in zip(tokens[::3], ranks[::3], strict=True)
    )
    caption = (
        f"{shape.name}, EP = {ep}, bfloat16, uniform routing in expectation, H200 at "
        f"{plan(shape, ep, 1, gpu).ranks[0].floor.bandwidth / 1e12:.1f} TB/s. Computed by epmoe.core.plan."
    )
    return Picture(figure, f"Floor over T. {words}"), caption


def determinism() -> Drawn:
    """All orders of adding the same eight numbers in float32."""
    values = torch.randn(7, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [8, 5, 3, 8, 2, 6, 4]
    )
    sums: dict[float, int] = {}
    for order in itertools.permutations(range(len(values))):
        total = torch.zeros(())
        for place in order:
            total = total + values[place]
        sums[float(total)] = sums.get(float(total), 0) + 1
    exact = float(values.double().sum())
    ordered = sorted(sums)
    figure = Figure(figsize=(7.2, 3.0), facecolor=PAPER)
    axes = figure.add_axes((0.1, 0.2, 0.87, 0.75))
    _plain(axes)
    axes.bar(
        [(s - exact) * 1e7 for s in ordered],
        [sums[s] for s in ordered],
        width=3.4,
        color=BLUE,
        alpha=0.7,
    )
    axes.axvline(0, color=RED, lw=1.2)
    axes.set_xlabel("distance from the exact sum, in units of 0.0000001", color=INK)
    axes.set_ylabel("orders", color=INK)
    orders = sum(sums.values())
    says = f"{orders} orders of adding seven numbers in float32 give {len(sums)} different results"
    return (
        Picture(figure, says),
        f"Seven fixed numbers, all {orders:,} orders of adding them in float32: {len(sums)} different sums. "
        "Computed when this page was built.",
    )
