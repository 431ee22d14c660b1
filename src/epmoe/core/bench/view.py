"""Results as tables for the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from epmoe.core.bench.headline import PARTS, parts_us
from epmoe.core.bench.padding import PaddingRow
from epmoe.core.bench.results import Measured, Point, Result
from epmoe.core.bench.streaming import rate_words


def render(result: Result) -> RenderableType:
    """Times, then ratios, then where the time goes, then whatever was refused, failed or left out."""
    parts: list[RenderableType] = [Text(title(result), style="bold"), _times(result)]
    if any(point.ratios for point in result.points):
        parts.append(_ratios(result))
    if any(one.profile for point in result.points for one in point.subjects.values()):
        parts.append(_split(result))
    return Group(*parts, _notes(result))


def title(result: Result) -> str:
    """One sentence: what was measured, where."""
    setting, machine = result.setting, result.machine
    how = "loopback share" if setting["loopback"] else setting["transport"]
    where = "EP {ep} ({how}), {dtype}, {routing}".format(how=how, **setting)
    return f"{setting['shape']['name']}, {where}, on {machine['device']}"


def _times(result: Result) -> Table:
    names = list(dict.fromkeys(n for p in result.points for n in p.subjects))
    table = Table("T", "active", "floor us", *names, box=box.SIMPLE_HEAD)
    for point in result.points:
        cells = [_time(point.subjects.get(name)) for name in names]
        table.add_row(
            str(point.tokens), active_words(point, result), f"{mean_floor(point):.1f}", *cells
        )
    nominal = rate_words(result.setting["floor_bytes_per_second"])
    read = rate_words(result.ceiling["read_bytes_per_second"])
    table.caption = (
        f"Microseconds per layer, mean over draws; in brackets time / floor at {nominal} and at the "
        f"{read} that this run streamed. (e) eager, not a graph. Clock: {result.setting['clock']}."
    )
    table.caption_justify = "left"
    return table


def active_words(point: Point, result: Result) -> str:
    """Active experts of the rank that counts, mean over draws."""
    rank = result.setting.get("rank")
    seen = [d.active[rank] if rank is not None else max(d.active) for d in point.draws]
    return f"{sum(seen) / len(seen):.1f}"


def mean_floor(point: Point) -> float:
    """Microseconds, mean over draws."""
    return sum(d.floor_us for d in point.draws) / len(point.draws)


def _time(one: Measured | None) -> str:
    if one is None:
        return "-"
    if one.error is not None or one.median_us is None or not one.over_floor or not one.over_ceiling:
        return "[bold red]FAILED[/bold red]"
    eager = " (e)" if one.mode == "eager" else ""
    return f"{one.median_us:.1f} ({one.over_floor[0]:.2f}, {one.over_ceiling[0]:.2f}){eager}"


def _ratios(result: Result) -> Table:
    pairs = list(dict.fromkeys((r.of, r.to) for p in result.points for r in p.ratios))
    table = Table("ratio of times", *(f"T={p.tokens}" for p in result.points), box=box.SIMPLE_HEAD)
    for of, to in pairs:
        cells = []
        for point in result.points:
            found = next((r for r in point.ratios if (r.of, r.to) == (of, to)), None)
            cells.append(
                f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]".replace("[", "\\[")
                if found
                else "-"
            )
        table.add_row(f"{of} / {to}", *cells)
    table.caption = (
        "Median of per-block ratios with its bootstrap 95% interval; below 1 the first is faster."
    )
    table.caption_justify = "left"
    return table


def _split(result: Result) -> Table:
    """Where the time of every profiled subject goes."""
    table = Table("T", "where the time goes", *PARTS, box=box.SIMPLE_HEAD)
    for point in result.points:
        for name, one in point.subjects.items():
            if one.profile:
                cells = (f"{us:.1f}" for us in parts_us(one.profile))
                table.add_row(str(point.tokens), name, *cells)
    table.caption = (
        "Microseconds per layer on draw 0, mean over ranks, of profiled runs, which are slower. Wait: what the "
        "exchange took above its time on the rank that came last."
    )
    table.caption_justify = "left"
    return table


def _notes(result: Result) -> Text:
    notes = {}
    for point in result.points:
        notes |= {f"refused: {name}: {why}": None for name, why in point.refused.items()}
        notes |= {
            f"FAILED at T={point.tokens}: {name}: {one.error}": None
            for name, one in point.subjects.items()
            if one.error
        }
    notes |= {f"not measured: T={t}: {why}": None for t, why in result.skipped.items()}
    return Text("\n".join(notes))


def render_padding(rows: Sequence[PaddingRow]) -> Table:
    """Rows done per row needed, a column per stage."""
    stages = list(dict.fromkeys(row.stage for row in rows))
    heads = [stage.replace("_", "\n") for stage in stages]  # whole in a narrow terminal too
    table = Table("EP", "routing", "T", *heads, box=box.SIMPLE_HEAD)
    settings = list(dict.fromkeys((r.ep, routing_words(r), r.tokens) for r in rows))
    for ep, routing, tokens in settings:
        found = {
            r.stage: r for r in rows if (r.ep, routing_words(r), r.tokens) == (ep, routing, tokens)
        }
        table.add_row(
            str(ep),
            routing,
            str(tokens),
            *(padding_cell(found[s]) if s in found else "-" for s in stages),
        )
    table.caption = "Rows sent per row needed, then rows computed per row needed."
    table.caption_justify = "left"
    return table


def routing_words(row: PaddingRow) -> str:
    """The kind, with zipf's exponent."""
    return row.routing if row.skew is None else f"{row.routing} {row.skew:g}"


def padding_cell(row: PaddingRow) -> str:
    """Both ratios."""
    sent = "-" if row.sent_ratio is None else f"{row.sent_ratio:.2f}"
    computed = "-" if row.computed_ratio is None else f"{row.computed_ratio:.2f}"
    return f"{sent}, {computed}"
