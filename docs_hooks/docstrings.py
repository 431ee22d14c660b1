"""Docstrings say `m[s][d]` of matrices; in Markdown that is a link. Escape it outside of code."""

import re
from typing import Any

import griffe


class PlainBrackets(griffe.Extension):
    """Escapes `][` in docstrings, except in code and in references to this project's objects."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = escape(obj.docstring.value)


def escape(text: str) -> str:
    """`ids[rank][token]` -> `ids[rank]\\[token]`; code spans and `[x][epmoe.core.x]` stay."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        p if p.startswith("`") else re.sub(r"\]\[(?!epmoe\.)", r"]\\[", p) for p in parts
    )
