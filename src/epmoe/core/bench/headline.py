"""The short tables of README and of the results page: the last stage against vLLM, and where its time goes.

Both are made from committed results alone; a setting that nobody measured has no row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from epmoe.core.bench.profile import products_us
from epmoe.core.bench.results import Result, compared

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SPLIT_SIZES = (1, 8, 128)
PARTS = ("span, us", "exchange", "wait", "products", "other kernels")
_OTHERS = ("vllm-default", "vllm-tuned", "vllm-agrs", "vllm-agrs-tuned")
_NAMES = {
    "vllm-default": "vLLM's experts",
    "vllm-tuned": "vLLM's experts, tuned",
    "vllm-agrs": "vLLM's experts, all-gather and reduce-scatter",
    "vllm-agrs-tuned": "the same, tuned",
}

Table = tuple[list[str], list[list[str]]]


def markdown_table(head: list[str], rows: list[list[str]], numbers: int = 0) -> str:
    """A Markdown table; columns from `numbers` on are right-aligned."""
    marks = ["---" if n < numbers else "---:" for n in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, marks, *rows))


def where(result: Result) -> str:
    """The machine in a few words: how many GPUs, or that one plays a share."""
    device, ep = result.machine["device"].removeprefix("NVIDIA "), result.setting["ep"]
    if result.setting["loopback"]:
        return f"one {device} as one of {ep} ranks"
    return f"{ep} {device}s, EP={ep}"


def against_vllm(measured: Mapping[str, Result], ours: str) -> Table:
    """Head and rows: time of stage `ours` over vLLM's, per T; bold where a difference may be claimed."""
    rows = [
        [where(result), _NAMES[other], *(_ratio(result, ours, other, t) for t in SIZES)]
        for result in _decode(measured)
        for other in _OTHERS
        if any(compared(point, ours, other) for point in result.points)
    ]
    return ["on", "against", *(f"T={t}" for t in SIZES)], rows


def time_split(measured: Mapping[str, Result], ours: str) -> Table:
    """Head and rows: exchange, waiting, products and the rest of `ours` and of vLLM's tuned layer over real ranks."""
    rows = []
    for result in _decode(measured):
        for point in (p for p in result.points if p.tokens in SPLIT_SIZES):
            for name, words in ((ours, ours), ("vllm-agrs-tuned", "vLLM's, tuned")):
                one = point.subjects.get(name)
                if one is not None and one.profile:
                    rows.append([where(result), str(point.tokens), words, *_whole(one.profile)])
    return ["on", "T", "layer", *PARTS], rows


def _whole(profile: Mapping[str, Any]) -> list[str]:
    return [f"{us:.0f}" for us in parts_us(profile)]


def _decode(measured: Mapping[str, Result]) -> Sequence[Result]:
    """Results of the decode sizes on a GPU, fewer ranks first, one GPU's share before whole groups."""
    found = [
        result
        for result in measured.values()
        if result.setting["clock"] == "CUDA events"
        and {p.tokens for p in result.points} >= set(SPLIT_SIZES)
    ]
    return sorted(found, key=lambda one: (not one.setting["loopback"], one.setting["ep"]))


def _ratio(result: Result, ours: str, other: str, tokens: int) -> str:
    point = next((p for p in result.points if p.tokens == tokens), None)
    found = compared(point, ours, other) if point else None
    if found is None:
        return "-"
    words = f"{found.median:.2f}"
    return words if found.claim == "no difference" else f"**{words}**"


def parts_us(profile: Mapping[str, Any]) -> tuple[float, ...]:
    """Microseconds of a profile, in the order of `PARTS`."""
    kernels = profile["kernels_us"]
    products = products_us(kernels)
    noted = [profile[part] for part in ("span_us", "exchange_us", "wait_us")]
    return (*noted, products, sum(kernels.values()) - products)
