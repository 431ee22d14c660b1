"""Files that people hand in, read so that whatever is wrong with one becomes an InputError that names it."""

import json
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
