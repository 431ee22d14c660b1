"""One figure for each idea, drawn when the site is built with the helpers and colours of `epmoe.core.figures`."""

from collections.abc import Callable

from docs_hooks.idea_plots import Drawn, determinism, memory_floor
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from epmoe.core.figures import (
    BLUE,
    FAINT,
    INK,
    LARGE,
    MUTED,
    ORANGE,
    RED,
    SMALL,
    Picture,
    box,
    canvas,
    write,
)

RANK_COLOURS = (BLUE, ORANGE, RED, MUTED)


def draw(name: str) -> Drawn:
    """The figure of that name and its caption."""
    figures: dict[str, Callable[[], Drawn]] = {
        "moe": moe,
        "expert_parallelism": expert_parallelism,
        "all_to_all": all_to_all,
        "memory_floor": memory_floor,
        "cuda_graphs": cuda_graphs,
        "determinism": determinism,
        "ladder": ladder,
    }
    if name not in figures:
        raise KeyError(f"no figure is called {name}: there are {', '.join(figures)}")
    return figures[name]()


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str,
    width: float = 1.2,
    bend: float = 0.0,
) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            lw=width,
            color=color,
            connectionstyle=style,
        )
    )


def moe() -> Drawn:
    """One token through a layer of eight experts."""
    figure, axes = canvas(78, 36)
    box(axes, 2, 15, 9, 6, BLUE, 0.2)
    write(axes, 6.5, 18, "token", weight="bold")
    box(axes, 17, 14, 11, 8, MUTED)
    write(axes, 22.5, 17.2, "router", weight="bold")
    write(axes, 22.5, 19.8, "E scores", size=SMALL, color=MUTED)
    _arrow(axes, (11.3, 18), (16.8, 18), INK)
    chosen = {2: 0.75, 5: 0.25}
    for expert in range(8):
        y = 2 + expert * 4.1
        on = expert in chosen
        box(axes, 38, y, 13, 3.2, BLUE if on else FAINT, 0.25 if on else 0.10)
        write(
            axes,
            44.5,
            y + 1.6,
            f"expert {expert}",
            color=INK if on else MUTED,
            weight="bold" if on else "normal",
            size=SMALL,
        )
        if on:
            _arrow(axes, (28.3, 18), (37.7, y + 1.6), BLUE, 1.6)
            _arrow(axes, (51.3, y + 1.6), (60.5, 18), BLUE, 1.6)
            write(
                axes,
                57.5,
                y + 1.6 + (1.4 if expert > 4 else -1.0),
                f"× {chosen[expert]}",
                color=BLUE,
                weight="bold",
            )
    box(axes, 61, 15, 13, 6, BLUE, 0.2)
    write(axes, 67.5, 18, "weighted sum", weight="bold")
    says = "A token goes to the router, which picks experts 2 and 5 of 8; their outputs, weighted, are added"
    return Picture(
        figure, says
    ), "K = 2 of E = 8 experts run for this token. The other six cost memory, but no time."


def expert_parallelism() -> Drawn:
    """Four GPUs: each its own tokens, each a quarter of the experts."""
    figure, axes = canvas(92, 38)
    for rank in range(4):
        x, color = 2 + rank * 23, RANK_COLOURS[rank]
        box(axes, x, 3, 19, 33, color, 0.05)
        write(
            axes,
            x + 9.5,
            5.2,
            f"rank {rank}",
            weight="bold",
            color=color if color != MUTED else INK,
            size=LARGE,
        )
        for token in range(3):
            box(axes, x + 2 + token * 5.3, 8, 4.2, 3.4, color, 0.25)
        write(axes, x + 9.5, 13.2, "its own tokens", size=SMALL, color=MUTED)
        box(axes, x + 2, 15, 15, 4, MUTED, 0.12)
        write(axes, x + 9.5, 17, "attention, whole copy", size=SMALL)
        for slot in range(2):
            box(axes, x + 2 + slot * 7.9, 23, 7.1, 4.4, color, 0.25)
            write(axes, x + 5.5 + slot * 7.9, 25.2, f"e{rank * 2 + slot}", weight="bold")
        write(axes, x + 9.5, 33.6, "a quarter of the experts", size=SMALL, color=MUTED)
    for a, b in ((0, 1), (1, 2), (2, 3)):
        _arrow(axes, (11.5 + a * 23 + 5, 22), (11.5 + b * 23 - 5, 22), INK, 1.0, -0.35)
        _arrow(axes, (11.5 + b * 23 - 5, 27.8), (11.5 + a * 23 + 5, 27.8), MUTED, 1.0, -0.35)
    says = "Four ranks, each with its own tokens, attention and two of eight experts; rows travel both ways"
    return Picture(figure, says), (
        "Tokens are split by rank, experts are split by rank, and the two splits have nothing to do with each other. "
        "So rows travel: out to the owner ranks (above) and home again (below)."
    )


def all_to_all() -> Drawn:
    """Blocks before and after: a transposition over ranks."""
    figure, axes = canvas(90, 34)
    cell = 6.0
    for side, x in (("before: send buffers", 9.0), ("after: receive buffers", 57.0)):
        write(axes, x + 2 * cell, 2.6, side, weight="bold", size=LARGE)
        for rank in range(4):
            y = 6 + rank * (cell + 0.8)
            write(axes, x - 4.6, y + cell / 2, f"rank {rank}", color=MUTED, size=SMALL)
            for block in range(4):
                source, target = (rank, block) if x < 30 else (block, rank)
                box(
                    axes,
                    x + block * cell + 0.2,
                    y,
                    cell - 0.4,
                    cell - 0.4,
                    RANK_COLOURS[source],
                    0.25,
                )
                write(
                    axes,
                    x + (block + 0.5) * cell,
                    y + cell / 2 - 0.2,
                    f"{source}→{target}",
                    size=SMALL,
                )
    _arrow(axes, (36, 19), (49.5, 19), INK, 1.8)
    write(axes, 42.7, 16.8, "all-to-all", weight="bold")
    says = "Rank s holds blocks s to 0, 1, 2, 3; after the exchange rank d holds blocks 0, 1, 2, 3 to d"
    return Picture(figure, says), (
        "Block s→d goes from rank s to rank d: a matrix of blocks is transposed. Colours are source ranks. Every rank "
        "sends and receives at the same time, one block to each, its own included."
    )


def cuda_graphs() -> Drawn:
    """A schedule of host and device: launched one by one, and replayed."""
    figure, axes = canvas(92, 34)
    write(
        axes,
        3,
        2.6,
        "eager: the host launches, reads sizes, launches again",
        ha="left",
        weight="bold",
    )
    write(axes, 3, 20, "CUDA graph: one launch replays all", ha="left", weight="bold")
    for y, words in ((5, "host"), (11, "device"), (22.5, "host"), (28, "device")):
        write(axes, 6.5, y + 2, words, ha="right", size=SMALL, color=MUTED)
    host, x = [], 8.0
    for wait in (0, 0, 9, 0, 0, 9, 0, 0):
        host.append((x, 4.6, wait))
        x += 4.9 + wait
    for at, width, wait in host:
        box(axes, at, 5, width, 4, MUTED, 0.2)
        box(axes, at + 4.2, 11, 3.4, 4, BLUE, 0.35)
        if wait:
            axes.add_patch(
                Rectangle((at + width + 0.15, 5.2), wait, 3.6, fc=RED, alpha=0.16, ec="none")
            )
            write(axes, at + width + wait / 2, 7, "waits", size=SMALL, color=RED)
    box(axes, 8, 22.5, 4.6, 4, MUTED, 0.2)
    for number in range(8):
        box(axes, 12.4 + number * 3.6, 28, 3.4, 4, BLUE, 0.35)
    write(
        axes,
        43,
        30,
        "nothing between them, and the host is free",
        ha="left",
        size=SMALL,
        color=MUTED,
    )
    says = "Eager: eight launches and two host waits leave gaps. Graph: one launch, eight kernels back to back"
    return (
        Picture(figure, says),
        "A schematic, not to scale: the same eight kernels. What a graph removes is the space between them.",
    )


def ladder() -> Drawn:
    """What each rung does in one call with the toy, counted on this machine."""
    from docs_hooks.facts import ROOT, traces

    from epmoe.core.figures import ledger_bars

    books = {}
    for name, trace in traces(ROOT).items():
        stage, scenario = name.split("/")
        if scenario == "toy.json":
            counts = trace["ledger"]
            books[stage[3:].replace("_", " ")] = {
                "collectives": max(len(book["collectives"]) for book in counts),
                "host waits": max(book["host_syncs"] for book in counts),
                "launches": max(book["launches"] for book in counts),
            }
    picture = ledger_bars(books)
    return (
        picture,
        "One call of each stage on the routing of these pages (2 ranks, 4 tokens), "
        "counted by its ledger when this site was built.",
    )
