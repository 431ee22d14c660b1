"""Files that people hand in or ask for: whatever is wrong with one becomes an InputError that names it."""

import json
import os
from pathlib import Path
from typing import Any

from epmoe.core.errors import InputError


def read_text(path: Path, what: str = "text") -> str:
    """The file's text. Raises InputError where there is none, or where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"no {what} in {path}: {error.strerror or error}; name a file that can be read"
        ) from error
    except ValueError as error:  # bytes that are no UTF-8, or a name with a null byte
        raise InputError(f"no {what} in {path}: {error}; name a UTF-8 file") from error


def parse_json(text: str) -> Any:
    """The value that a JSON text stands for. Raises ValueError for anything else, however deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep to be read") from None


def read_json(path: Path, what: str = "JSON") -> Any:
    """The value in a file of JSON. Raises InputError that names the file and what it should hold."""
    text = read_text(path, what)
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"no {what} in {path}: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write the text as UTF-8, whole or not at all: a reader never sees half a file. Makes the folder.

    Raises InputError that names the file where it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a device such as /dev/stdout is not replaced
            path.write_text(text, encoding="utf-8")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, text)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be written: {why}; name another file") from error


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")  # another process may write the same file
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
