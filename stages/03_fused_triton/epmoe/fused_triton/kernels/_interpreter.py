"""What Triton's interpreter does again and again, done once: interpreted kernels run about twice as fast.

It is a matter of waiting only: the interpreter computes the same values in the same order. Where kernels are
interpreted, every kernel of the process is.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from triton import knobs


class _Kept:
    """Stands for the record of what was replaced, which the interpreter would put back after each kernel."""

    def restore(self) -> None:
        """Nothing is put back."""


def make_quicker() -> None:
    """Change the interpreter of this process; does nothing where kernels are compiled, or where it is built otherwise.

    Three habits go. It looks for the builtins of `triton.language`, to replace them by its own, whenever a kernel
    starts and whenever one function calls another. It makes a table of NumPy's types whenever it asks for one. And it
    computes, for every integer operation, whether that overflows, and forgets the answer unless it debugs.
    """
    if not knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _once(interpreter._patch_lang)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    options: Any = getattr(interpreter.interpreter_builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        kept: Any = replace(options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = kept


def _once(prepare: Callable[[Any], Any]) -> Callable[[Any], _Kept]:
    @cache
    def once(function: Callable[..., Any]) -> _Kept:
        prepare(function)
        return _Kept()

    return once


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    return numpy_type
