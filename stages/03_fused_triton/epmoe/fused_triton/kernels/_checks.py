"""Checks that launchers make before they allocate or launch anything."""

import torch
from torch import Tensor

from epmoe.core.errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def need(condition: bool, message: str) -> None:
    """Raise InputError(message) unless `condition`."""
    if not condition:
        raise InputError(message)


def need_contiguous(**tensors: Tensor) -> None:
    """Every tensor must be contiguous: the kernels take strides from shapes."""
    for name, tensor in tensors.items():
        need(
            tensor.is_contiguous(),
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: pass {name}.contiguous()",
        )


def need_dense_rows(name: str, tensor: Tensor) -> None:
    """The values of a row must be neighbours; where there is at most one value, or no row, strides mean nothing."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1 or tensor.numel() == 0
    need(dense, f"{name} has strided rows: pass {name}.contiguous()")


def need_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """`tensor` must have exactly this shape."""
    need(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}: expected {shape}")


def need_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """`tensor` must have one of these dtypes."""
    need(
        tensor.dtype in dtypes,
        f"{name} has dtype {tensor.dtype}: expected {' or '.join(map(str, dtypes))}",
    )


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and `least`: Triton's block sizes are powers of two."""
    return max(least, 1 << max(value - 1, 0).bit_length())
