"""What the commands of `epmoe` share: options that mean the same everywhere, and how an answer is given."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from epmoe.core.errors import InputError
from epmoe.core.ranks.time_limits import check_seconds
from epmoe.core.ranks.torchrun import speaks

# under torchrun every rank runs the command and rank 0 speaks
_answers = Console(quiet=not speaks())
notes = Console(stderr=True, quiet=not speaks())  # progress: standard output stays clean for --json


def check_files(*paths: Path | None, makes_folders: bool = False) -> None:
    """Raise InputError before anything runs where a file could not be written.

    makes_folders: the writer makes missing folders, so only what is there already can be in its way.
    """
    for path in paths if speaks() else ():  # other ranks write nothing, maybe on other machines
        if path is not None and not _can_be_written(path, makes_folders):
            raise InputError(
                f"{path} cannot be written: name a file in a folder that exists and lets you write"
            )


def _can_be_written(path: Path, makes_folders: bool) -> bool:
    folder = path.absolute().parent
    if makes_folders:
        folder = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    if os.path.isdir(path) or not os.path.isdir(folder):
        return False
    return os.access(path if os.path.exists(path) else folder, os.W_OK)


def writable(target: Any) -> Any:
    """Callback of options that name a file to write, `-` for standard output: refused before a long run, not after."""
    check_files(_file(target))
    return target


def writable_in_new_folder(target: Any) -> Any:
    """As `writable`, for commands that make the folder."""
    check_files(_file(target), makes_folders=True)
    return target


def _file(target: str | Path | None) -> Path | None:
    return None if target in (None, "-") else Path(target)


def time_limit(seconds: float | None) -> float | None:
    """Callback of options in seconds: a limit that is none would be found only by ranks that have started."""
    if seconds is not None:
        check_seconds("timeout", seconds)
    return seconds


Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE]", help="Write JSON to FILE, or print it.", callback=writable
    ),
]
Ranks = Annotated[int, typer.Option(min=1, help="How many expert-parallel ranks.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


def deliver(data: Any, target: str | None, table: RenderableType) -> None:
    """The table for people; JSON where it was asked for. Under torchrun by rank 0."""
    if not speaks():
        return
    if target == "-":
        print(json.dumps(data, indent=2, default=str))
        return
    _answers.print(table)  # first: whatever happens to the file, the answer has been given
    if target is not None:
        write_answer(Path(target), json.dumps(data, indent=2, default=str) + "\n")


def write_answer(path: Path, text: str) -> None:
    """Write a result; InputError where the place went away meanwhile."""
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}; name another file"
        ) from error
