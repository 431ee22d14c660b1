"""The one place where a Triton kernel is started.

Programmatic dependent launch (PDL, Hopper and later): a kernel may start while its predecessor drains. Each kernel here
waits (`gdc_wait`) before it touches anything that an earlier kernel wrote, then lets its own successor start.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda

from epmoe.core import ledger
from epmoe.fused_triton.kernels._checks import need
from epmoe.fused_triton.kernels._interpreter import make_quicker

make_quicker()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the kernels before this one have finished and their writes are visible."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def pdl_start_next(PDL: tl.constexpr):
    """Let the next kernel start once all programs of this one have come here."""
    if PDL:
        cuda.gdc_launch_dependents()


def launch(kernel: Any, grid: Sequence[int], *args: Any, pdl: bool = False, **meta: Any) -> None:
    """Start `kernel` on `grid`; an empty grid starts nothing (the driver refuses those).

    Args:
        kernel: a @triton.jit function with a constexpr PDL.
        grid: programs per axis, at most three axes.
        pdl: use programmatic dependent launch; only where `pdl_supported` says so.
        meta: constexprs, num_warps, num_stages.
    """
    need(len(grid) <= 3, f"grid {tuple(grid)} has more than 3 axes")
    if 0 in grid:
        return
    pdl = pdl and not knobs.runtime.interpret  # the interpreter has no such instructions
    extra = {"launch_pdl": True} if pdl else {}
    ledger.record_launch(kernel.fn.__name__.strip("_").removesuffix("_kernel"))
    with ledger.paused():  # what the interpreter does inside is one launch
        kernel[tuple(grid)](*args, PDL=pdl, **meta, **extra)


@cache
def pdl_supported(device: torch.device) -> bool:
    """True on NVIDIA GPUs of compute capability 9.0 and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 on a CPU, where the interpreter runs programs one after another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
