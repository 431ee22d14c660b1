"""What the commands of `epmoe` share: options that mean the same everywhere, and how an answer is given."""

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from epmoe.core.errors import InputError
from epmoe.core.ranks.time_limits import check_seconds
from epmoe.core.ranks.torchrun import speaks
from epmoe.core.reading import read_text

# under torchrun every rank runs the command and rank 0 speaks
answers = Console(quiet=not speaks())
notes = Console(stderr=True, quiet=not speaks())  # progress: standard output stays clean for --json


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """Around a whole command: whoever reads its answer may stop reading, and may know ASCII only."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends: into a place that takes everything
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def text_of(path: Path) -> str:
    """The text of a file for a model to read. Raises InputError where there is none."""
    if text := read_text(path):
        return text
    raise InputError(f"no text in {path}: it is empty, name a file with at least one character")


def check_file(path: Path | None, makes_folders: bool = False) -> None:
    """Raise InputError before anything runs where the file could not be written.

    makes_folders: the writer makes missing folders, so only what is there already can be in its way.
    """
    if str(path) == "-":
        raise InputError("- is no file: name one; only --json writes to standard output")
    if path is None or not speaks():  # other ranks write nothing, maybe on other machines
        return
    if not _can_be_written(path, makes_folders):
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
    check_file(_file(target))
    return target


def writable_in_new_folder(target: Any) -> Any:
    """As `writable`, for commands that make the folder."""
    check_file(_file(target), makes_folders=True)
    return target


def _file(target: str | Path | None) -> Path | None:
    return None if target in (None, "-") else Path(target)


def time_limit(option: typer.CallbackParam, seconds: float | None) -> float | None:
    """Callback of options in seconds: a limit that is none would be found only by ranks that have started."""
    if seconds is not None:
        check_seconds(str(option.name), seconds)
    return seconds


def whole_numbers(name: str, text: str, least: int = 0) -> tuple[int, ...]:
    """What the option `name` holds: numbers of at least `least` with commas, like 1,8,128; else an InputError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,18}", part) and int(part) >= least for part in parts):
        raise InputError(
            f"{name}={text!r}: give whole numbers of at least {least} with commas, like 1,8"
        )
    return tuple(map(int, parts))


def _json(callback: Callable[[Any], Any]) -> Any:
    words = "Write JSON to FILE, or print it."
    return typer.Option("--json", metavar="[FILE]", help=words, callback=callback)


Json = Annotated[str | None, _json(writable)]
JsonInNewFolder = Annotated[str | None, _json(writable_in_new_folder)]
Ranks = Annotated[int, typer.Option(min=1, help="How many expert-parallel ranks.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
# further seeds follow from it, of every rank and draw, and torch takes 64 bits
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of all that is drawn.")]


def deliver(data: Any, target: str | None, table: RenderableType) -> None:
    """The table for people; JSON where it was asked for. Under torchrun by rank 0."""
    deliver_text(json.dumps(data, indent=2, default=str) + "\n", target, table)


def deliver_text(text: str, target: str | None, table: RenderableType) -> None:
    """As `deliver`, for data that is JSON already."""
    if not speaks():
        return
    if target == "-":
        print(text, end="")
        return
    # first: whatever happens to the file, the answer has been given
    answers.print(table, crop=False)
    if target is not None:
        write_answer(Path(target), text)


def write_answer(path: Path, text: str) -> None:
    """Write a result; InputError where the place went away meanwhile."""
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}; name another file"
        ) from error
