"""What the commands of `epmoe` share: options that mean the same everywhere, and how an answer is given."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from epmoe.core.ranks.torchrun import speaks

# under torchrun every rank runs the command and rank 0 speaks
_answers = Console(quiet=not speaks())
notes = Console(stderr=True, quiet=not speaks())  # progress: standard output stays clean for --json

Json = Annotated[
    str | None, typer.Option("--json", metavar="[FILE]", help="Write JSON to FILE, or print it.")
]
Ranks = Annotated[int, typer.Option(min=1, help="How many expert-parallel ranks.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


def deliver(data: Any, target: str | None, table: RenderableType) -> None:
    """The table for people; JSON where it was asked for. Under torchrun by rank 0."""
    if not speaks():
        return
    if target is None:
        _answers.print(table)
    elif target == "-":
        print(json.dumps(data, indent=2, default=str))
    else:
        Path(target).write_text(json.dumps(data, indent=2, default=str) + "\n")
        _answers.print(table)
