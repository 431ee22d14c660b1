"""The tour on a terminal: a table of stages, and a picture of where the tokens went."""

from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from epmoe.core.tables import WholeTable
from epmoe.core.tour import StageRow, TourReport

SHADES = " ░▒▓█"
ASCII_SHADES = " .:*#"


def render(report: TourReport) -> RenderableType:
    """Everything that the tour has to say, once it is over."""
    return Group(
        Text(report.layer, "bold"),
        _stage_table(report),
        Text(_legend(report), "dim"),
        *_refusals(report),
        Text("\nWhere the tokens went: a column is an expert; the darker, the more visits", "bold"),
        Picture(report),
        _verdict(report),
    )


def _stage_table(report: TourReport) -> WholeTable:
    table = WholeTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.words("stage")
    table.numbers("error", "coll.", "KiB", "syncs", "launches", "rows", "graph", "ms")
    for stage, rows in report.stages().items():
        table.add_row(stage, *_cells(rows), style=None if _right(rows) else "bold red")
    return table


def _legend(report: TourReport) -> str:
    allowed = report.rows[0].tolerance if report.rows else 0.0
    clock = (
        "this CPU's, no hint of a GPU's"
        if report.device == "cpu"
        else "eager calls on the slowest rank"
    )
    return (
        f"error     largest of all ranks, relative to the terms added; {allowed:.1e} is allowed\n"
        "coll.     collectives of one call; syncs: host waits; launches: operators\n"
        "KiB       sent to other ranks, by all; rows: computed / needed, by all\n"
        f"graph     can be captured in a CUDA graph; ms: {clock}"
    )


def _cells(rows: list[StageRow]) -> list[str]:
    def most(key: str) -> int:
        return max(row.ledger[key] for row in rows)

    done = sum(row.ledger["rows_computed"] for row in rows)
    return [
        f"{max(row.error for row in rows):.1e}",
        str(max(len(row.ledger["collectives"]) for row in rows)),
        f"{sum(row.ledger['wire_bytes'] for row in rows) / 1024:.0f}",
        str(most("host_syncs")),
        str(most("launches")),
        f"{done}/{sum(row.rows_needed for row in rows)}",
        "yes" if rows[0].graph_capturable else "no",
        f"{max(row.seconds for row in rows) * 1e3:.1f}",
    ]


def _right(rows: list[StageRow]) -> bool:
    return all(row.right for row in rows)


def _refusals(report: TourReport) -> list[Text]:
    return [
        Text(f"{stage} did not run: {why}", "bold red") for stage, why in report.refused.items()
    ]


@dataclass(frozen=True)
class Picture:
    """Where the tokens went, in characters that the terminal has."""

    report: TourReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _picture(self.report, ASCII_SHADES if options.ascii_only else SHADES)


def _picture(report: TourReport, shades: str) -> WholeTable:
    """Source ranks down, experts across in blocks by owner rank: the darker, the more tokens."""
    visits_RE = torch.tensor(report.visits)
    ranks, most = len(report.visits), max(1, int(visits_RE.max()))
    picture = WholeTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    picture.add_column("from \\ to ", no_wrap=True)
    for rank in range(ranks):  # "rank" above each, so that a narrow block stays narrow
        picture.add_column(f"rank\n{rank}", no_wrap=True)
    picture.numbers("visits")
    for rank, row in enumerate(report.visits):
        picture.add_row(
            f"rank {rank}", *_blocks(row, report.owners, ranks, most, shades), str(sum(row))
        )
    arrived = [
        str(sum(int(visits_RE[:, e].sum()) for e, owner in enumerate(report.owners) if owner == r))
        for r in range(ranks)
    ]
    picture.add_section()
    picture.add_row("arrived", *arrived, str(int(visits_RE.sum())), style="bold")
    return picture


def _blocks(row: list[int], owners: list[int], ranks: int, most: int, shades: str) -> list[str]:
    drawn = [shades[-(-count * (len(shades) - 1) // most)] for count in row]
    wide = 2 if len(row) <= 24 else 1
    return [
        "".join(shade * wide for shade, owner in zip(drawn, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]


def _verdict(report: TourReport) -> Text:
    if report.right:
        return Text("Every stage gives the oracle's answer on every rank.", "bold green")
    wrong = [stage for stage, rows in report.stages().items() if not _right(rows)]
    return Text(
        f"Not right: {', '.join(wrong + list(report.refused)) or 'nothing ran'}.", "bold red"
    )
