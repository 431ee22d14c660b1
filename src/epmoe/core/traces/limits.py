"""What the site's limit explorer starts from: GPUs, shapes, and answers of `plan` that its own formulas must give.

The explorer computes in the reader's browser. `reference` holds inputs with the numbers that `plan` gives for them; a
browser test holds one against the other, so the page cannot drift away from the library.
"""

import itertools
from collections.abc import Iterator

from epmoe.core.placement import contiguous
from epmoe.core.plan import SCHEMES, plan
from epmoe.core.plan.gpus import GPUS, Gpu
from epmoe.core.plan.load import expected_load
from epmoe.core.shape import SHAPES, MoEShape

_GRID = {
    "glm-5.3-flash": ((4, 8, 32), (1, 8, 128, 8192)),
    "qwen3-moe-30b": ((1, 6), (1, 100)),
    "mixtral": ((2, 8), (1, 64)),
    "deepseek-v3": ((8, 100), (1, 32)),
    "toy": ((2, 3), (1, 2)),
}


def explorer() -> dict:
    """Everything as plain data: rates per second, sizes in bytes."""
    return {
        "gpus": {name: _gpu(gpu) for name, gpu in GPUS.items()},
        "shapes": {name: _shape(shape) for name, shape in SHAPES.items() if name != "toy"},
        "schemes": list(SCHEMES),
        "reference": list(_reference()),
    }


def _gpu(gpu: Gpu) -> dict:
    return {
        "bandwidth": gpu.streaming_bandwidth,
        "bandwidth_source": gpu.streaming_source,
        "bfloat16": gpu.bf16_flops,
        "float8": gpu.fp8_flops,
        "link": gpu.nvlink_bandwidth,
        "memory": gpu.memory,
        "source": gpu.source,
    }


def _shape(shape: MoEShape) -> dict:
    return {k: getattr(shape, k) for k in ("hidden", "intermediate", "experts", "topk", "layers")}


def _reference() -> Iterator[dict]:
    for name, (eps, tokens) in _GRID.items():
        for ep, count in itertools.product(eps, tokens):
            for dtype, gpu in itertools.product(("bfloat16", "float8"), GPUS):
                yield _answer(SHAPES[name], ep, count, dtype, gpu)


def _answer(shape: MoEShape, ep: int, tokens: int, dtype: str, gpu: str) -> dict:
    found = plan(shape, ep, tokens, gpu, dtype=dtype)
    rank = found.slowest
    load = expected_load(shape, ep, tokens, contiguous(shape.experts, ep))
    return {
        "input": {**_shape(shape), "ep": ep, "tokens": tokens, "dtype": dtype, "gpu": gpu},
        "output": {
            "local": rank.local_experts,
            "active": rank.active_experts,
            "resident_bytes": rank.resident_bytes,
            "assignments": load.assignments[rank.rank],
            "memory_seconds": rank.floor.memory_seconds,
            "compute_seconds": rank.floor.compute_seconds,
            "floor_seconds": found.floor_seconds,
            "wires": {w.scheme: _wire(w) for w in found.wires},
        },
    }


def _wire(wire) -> dict:
    return {
        "dispatch_bytes": sum(wire.dispatch_bytes),
        "combine_bytes": sum(wire.combine_bytes),
        "peak_bytes": wire.dispatch_peak_bytes + wire.combine_peak_bytes,
        "rows_sent": wire.rows_sent,
        "rows_needed": wire.rows_needed,
        "row_bytes": wire.dispatch_row_bytes,
    }
