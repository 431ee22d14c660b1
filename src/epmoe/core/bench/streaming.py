"""The run's own memory ceiling: how fast this device reads, and copies, large tensors today."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epmoe.core.bench.method import Clock

_BLOCKS, _STEPS, _WARPS = (1024, 2048, 4096), 8, (4, 8)
_PASSES = 5


def rate_words(bytes_per_second: float) -> str:
    """4.18 TB/s of a GPU, 23.4 GB/s of a CPU."""
    if bytes_per_second >= 1e11:
        return f"{bytes_per_second / 1e12:.2f} TB/s"
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def ceiling(clock: Clock, tensors: Sequence[Tensor]) -> dict[str, float | str]:
    """Bytes/s of a pass that only reads the tensors, the best of several kernels, and of a copy (read plus write).

    Args:
        clock: times a pass; ranks start together, so ranks that share a GPU see their share.
        tensors: gigabytes of them, so that no cache helps. On a CPU torch's own sum stands for the kernel.
    """
    flat = [t.view(-1).view(torch.int32) for t in tensors]
    nbytes = sum(t.nbytes for t in flat)
    readers = (
        _gpu_readers(flat) if flat[0].is_cuda else {"torch.sum": lambda: [_sum(t) for t in flat]}
    )
    speeds = {name: nbytes / _best_seconds(clock, read) for name, read in readers.items()}
    best = max(speeds, key=lambda name: speeds[name])
    copy = torch.empty_like(flat[0])
    seconds = _best_seconds(clock, lambda: copy.copy_(flat[0]))
    return {
        "read_bytes_per_second": speeds[best],
        "read_kernel": best,
        "bytes_per_pass": nbytes,
        "copy_bytes_per_second": 2 * copy.nbytes / seconds,
    }


def _sum(x: Tensor) -> Tensor:
    return x.sum()


def _gpu_readers(flat: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    from epmoe.core.bench import streaming_kernel

    kernel: Any = streaming_kernel.read_all  # launch options are no parameters of the function

    def reader(block: int, warps: int) -> Callable[[], object]:
        # what is left of a tensor behind its last whole chunk is less than 0.01% and is not read
        grids = [max(1, t.numel() // (block * _STEPS)) for t in flat]
        sums = torch.empty(max(grids), dtype=torch.int32, device=flat[0].device)

        def read() -> None:
            for t, programs in zip(flat, grids, strict=True):
                kernel[(programs,)](t, sums, BLOCK=block, STEPS=_STEPS, num_warps=warps)

        return read

    least = min(t.numel() for t in flat)
    return {
        f"block {block}, {warps} warps": reader(block, warps)
        for block in _BLOCKS
        for warps in _WARPS
        if block * _STEPS <= least
    }


def _best_seconds(clock: Clock, work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_PASSES):
        clock.start()
        work()
        clock.stop()
        times.append(clock.milliseconds() / 1e3)
    return max(min(times), 1e-9)
