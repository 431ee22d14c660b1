"""Plain values that callers hand in: whole numbers, and dtypes by their names."""

from typing import Any, TypeGuard

import torch

from epmoe.core.errors import InputError

# every dtype that is called by a name; which of them fit is for each caller to say
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
}
_OF_LAYERS = ("float32", "bfloat16", "float16")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise InputError, which calls the value `name`, unless it is a whole number from `least` to `most`."""
    if is_whole(value) and least <= value and (most is None or value <= most):
        return
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InputError(f"{name}={_short(value)}: give a whole number {limits}")


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16, float32, ...: what `named_dtype` takes."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str, device: str) -> torch.dtype:
    """The dtype of that name; "auto" is bfloat16 on cuda, and float32 on a CPU, where Triton's interpreter has no sound
    bfloat16. Raises InputError for others."""
    if name == "auto":
        name = "bfloat16" if device == "cuda" else "float32"
    if name not in _OF_LAYERS:
        raise InputError(f"dtype={name!r}: choose auto, {', '.join(_OF_LAYERS)}")
    return DTYPES[name]


def _short(value: object) -> str:
    if is_whole(value) and value.bit_length() > 256:
        return f"(a number of {value.bit_length()} bits)"  # Python refuses to write thousands of digits
    words = repr(value)
    return words if len(words) <= 80 else f"{words[:60]}... ({len(words)} characters)"
