"""Tables that lose nothing where the terminal is narrow: words wrap, numbers stay whole.

    table = WholeTable(box=box.SIMPLE_HEAD)
    table.words("stage")
    table.numbers("error", "ms")

A table that has come to its least width stays so wide: print it uncropped, and its lines run over.
"""

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_WORDS = 12  # characters that a column of words keeps; longer words are folded


class WholeTable(Table):
    """A rich Table that never cuts a cell off with an ellipsis."""

    def words(self, *names: str) -> None:
        """Add columns whose cells may wrap, at spaces where they can."""
        for name in names:
            self.add_column(name, overflow="fold")

    def numbers(self, *names: str) -> None:
        """Add columns, flush right, whose cells and names are never broken."""
        for name in names:
            self.add_column(name, justify="right", no_wrap=True, overflow="fold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = self._least_width(console)
        return super().__rich_console__(
            console, options.update(width=max(options.max_width, least))
        )

    def _least_width(self, console: Console) -> int:
        """Characters with which rich has no reason to shorten a number; the frame's are counted in full."""
        _, right, _, left = self.padding
        frame = 1 + left + right
        return 1 + sum(frame + _least_cells(console, column) for column in self.columns)


def _least_cells(console: Console, column: Column) -> int:
    wide = console.options.update(width=10_000)  # how wide it wants to be, not how wide it may be
    sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
    if column.no_wrap:
        return max(size.maximum for size in sizes)
    return min(_WORDS, max(size.minimum for size in sizes))
