"""Tables and numbers of the pages, each from the library, from committed results or from the repository itself."""

import bisect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from epmoe.core.bench import report
from epmoe.core.bench.headline import markdown_table
from epmoe.core.bench.results import Result
from epmoe.core.plan import SCHEMES, expected_active, expected_load, expert_bytes, plan, wire_bytes
from epmoe.core.plan.gpus import GPUS
from epmoe.core.plan.load import hit_probability
from epmoe.core.shape import SHAPES

ROOT = Path(__file__).resolve().parent.parent
FACTS: dict[str, Callable[..., str]] = {}
RECORD = "glm-5.3-flash"


def fact(function: Callable[..., str]) -> Callable[..., str]:
    """Register a function under its name."""
    FACTS[function.__name__] = function
    return function


@cache
def measured_results() -> Mapping[str, Result]:
    """The committed measurements by file name, read once: each is held against its samples, which takes seconds."""
    return report.read_results(ROOT)[0]


@fact
def expert_mb(shape: str, dtype: str = "bfloat16") -> str:
    return f"{expert_bytes(SHAPES[shape], dtype) / 1e6:.1f} MB"


@fact
def layer_gb(shape: str) -> str:
    return f"{SHAPES[shape].experts * expert_bytes(SHAPES[shape]) / 1e9:.1f} GB"


@fact
def model_gb(shape: str) -> str:
    one = SHAPES[shape]
    return f"{one.layers * one.experts * expert_bytes(one) / 1e9:,.0f} GB"


@fact
def size(shape: str, name: str) -> str:
    """One size of a named shape."""
    return f"{getattr(SHAPES[shape], name):,}".replace(",", " ")


@fact
def gpu_memory_gb(gpu: str) -> str:
    return f"{GPUS[gpu].memory / 1e9:.0f} GB"


@fact
def bandwidth_tb(gpu: str) -> str:
    return f"{GPUS[gpu].streaming_bandwidth / 1e12:.2g} TB/s"


@fact
def bandwidth_source(gpu: str) -> str:
    return GPUS[gpu].streaming_source


@fact
def active(tokens: str, ep: str = "4", shape: str = RECORD) -> str:
    """Active experts of a rank, in expectation under uniform routing."""
    return f"{expected_active(SHAPES[shape], int(ep), int(tokens))[0]:.1f}"


@fact
def floor_us(tokens: str, ep: str = "4", shape: str = RECORD, gpu: str = "h200") -> str:
    return f"{plan(SHAPES[shape], int(ep), int(tokens), gpu).floor_seconds * 1e6:,.0f} µs"


@fact
def turning_point(ep: str = "4", shape: str = RECORD, gpu: str = "h200") -> str:
    """The least T at which the layer is bound by arithmetic."""

    def bound_by_arithmetic(tokens: int) -> bool:
        return plan(SHAPES[shape], int(ep), tokens, gpu).slowest.floor.bound == "compute"

    return str(bisect.bisect_left(range(2**20), True, lo=1, key=bound_by_arithmetic))


@fact
def hit_percent(ep: str, shape: str = RECORD) -> str:
    """How likely a token names at least one expert of a given rank."""
    one = SHAPES[shape]
    return f"{100 * hit_probability(one, one.experts // int(ep)):.0f} %"


@fact
def models_table() -> str:
    rows = [
        [
            s.name,
            str(s.experts),
            str(s.topk),
            f"{expert_bytes(s) / 1e6:,.1f}",
            f"{s.experts * expert_bytes(s) / 1e9:,.1f}",
            f"{s.layers * s.experts * expert_bytes(s) / 1e9:,.0f}",
            f"{100 * s.topk / s.experts:.1f} %",
        ]
        for s in SHAPES.values()
        if s.name not in ("toy", "tiny")
    ]
    head = [
        "model",
        "E",
        "K",
        "MB an expert",
        "GB a layer",
        "GB all layers",
        "weights used by a token",
    ]
    return markdown_table(head, rows, 1)


@fact
def gpus_table() -> str:
    rows = [
        [
            g.name.upper(),
            f"{g.memory / 1e9:.0f}",
            f"{g.memory_bandwidth / 1e12:.2f}",
            f"{g.nvlink_bandwidth / 1e9:.0f}",
            f"{g.bf16_flops / 1e12:,.0f}",
            f"{g.memory_bandwidth / g.nvlink_bandwidth:.1f}",
            g.source,
        ]
        for g in GPUS.values()
    ]
    head = [
        "GPU",
        "memory, GB",
        "memory, TB/s",
        "NVLink out, GB/s",
        "BF16, TFLOP/s",
        "memory / NVLink",
        "source",
    ]
    table = markdown_table(head, rows, 1).splitlines()
    table[1] = table[1].rsplit(" ---: |", 1)[0] + " --- |"
    return "\n".join(table)


@fact
def floor_table(shape: str = RECORD, ep: str = "4", gpu: str = "h200") -> str:
    rows = []
    for tokens in (1, 8, 32, 128, 512, 2048, 8192):
        found = plan(SHAPES[shape], int(ep), tokens, gpu).slowest
        f = found.floor
        cells = [
            found.active_experts,
            f.memory_seconds * 1e6,
            f.compute_seconds * 1e6,
            f.seconds * 1e6,
        ]
        rows.append([str(tokens), *(f"{c:,.1f}" for c in cells), f.bound])
    head = ["T", "active experts", "memory, µs", "compute, µs", "floor, µs", "bound by"]
    return markdown_table(head, rows)


@fact
def wire_table(tokens: str = "8", shape: str = RECORD) -> str:
    rows = []
    for ep in (2, 4, 8, 16, 32):
        load = expected_load(SHAPES[shape], ep, int(tokens))
        wires = [wire_bytes(scheme, SHAPES[shape], load) for scheme in SCHEMES]
        cells = [(sum(w.dispatch_bytes) + sum(w.combine_bytes)) / ep / 1e6 for w in wires]
        rows.append([str(ep), *(f"{c:.2f}" for c in cells)])
    return markdown_table(["EP", *(name.replace("_", " ") for name in SCHEMES)], rows)


@fact
def wire_us(scheme: str, tokens: str, ep: str = "4", gpu: str = "h200") -> str:
    """Least time of both exchanges over the links."""
    found = plan(SHAPES[RECORD], int(ep), int(tokens), gpu)
    return f"{found.wire(scheme).seconds(found.link_bandwidth) * 1e6:.1f} µs"
