"""What the page on placements shows: the output of `epmoe balance` on the small real checkpoint."""

from functools import cache
from io import StringIO

from docs_hooks.fact_tables import ROOT, fact
from rich.console import Console

from epmoe.core.balance import balance
from epmoe.core.commands.balance import Counts, render, routed_counts

MODEL = "models/tiny-glm-moe"
RANKS = 16


@fact
def balance_output(redundant: str) -> str:
    """The command and what it prints."""
    found = {
        layer: balance(one, RANKS, int(redundant)) for layer, one in _counts_of_model().items()
    }
    console = Console(file=StringIO(), width=100)
    console.print(render(found))
    assert isinstance(console.file, StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    options = f" --redundant {redundant}" if int(redundant) else ""
    shown = "\n".join(line for line in lines if line)
    return f"```text\n$ epmoe balance --model {MODEL} --ep {RANKS}{options}\n{shown}\n```"


@cache
def _counts_of_model() -> Counts:
    return routed_counts(ROOT / MODEL, None, None, tokens=1024)
