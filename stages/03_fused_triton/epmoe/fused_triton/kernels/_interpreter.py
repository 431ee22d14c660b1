"""Triton's interpreter prepares `triton.language` once for each function, not at every call.

To run a kernel in Python, the interpreter replaces the builtins of `triton.language` by its own. It looks for them anew
whenever a kernel starts and whenever one function calls another: a third of the time of a small kernel. Where kernels
are interpreted, every kernel of the process is, so what was replaced may stay.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from triton import knobs


class _Kept:
    """Stands for the record of what was replaced, which the interpreter would put back after each kernel."""

    def restore(self) -> None:
        """Nothing is put back."""


def prepare_once() -> None:
    """Make the interpreter remember; does nothing where kernels are compiled, or where Triton works otherwise."""
    if not knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    prepare: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if prepare is None or hasattr(prepare, "cache_info"):
        return

    @cache
    def once(function: Callable[..., Any]) -> _Kept:
        prepare(function)
        return _Kept()

    interpreter._patch_lang = once
