"""A comparison as a table and as a picture."""

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text

from epmoe.core.figures import BLUE, FAINT, INK, MUTED, ORANGE, RED, SMALL, Picture, canvas
from epmoe.vllm_plugin.compare import Comparison
from epmoe.vllm_plugin.judge import StageResult
from epmoe.vllm_plugin.settings import NATIVE


def table(comparison: Comparison) -> Table:
    """One row per stage."""
    plan = comparison.plan
    title = f"{plan.model}: {len(plan.prompts)} prompts x {plan.tokens} tokens, {plan.dtype} on {plan.device}"
    shown = Table(title=title, box=None, title_justify="left", pad_edge=False)
    shown.add_column("experts on", no_wrap=True)
    for column in ("ranks", "ids", "logprobs off", "calls", "spoilt", "tokens/s : native"):
        shown.add_column(column)
    for result in comparison.results:
        shown.add_row(*row(result))
    for stage in comparison.failed:
        shown.add_row(stage, "-", "[red]failed[/red]")
    return shown


def with_last_words(comparison: Comparison) -> Group:
    """The table, and below it what every stage that failed said last."""
    failed = comparison.failed.items()
    return Group(
        table(comparison), *(Text(f"\n{stage} failed: {words}") for stage, words in failed)
    )


def row(result: StageResult) -> tuple[str, ...]:
    mode = "eager" if result.eager else "compiled"
    distance = f"{result.max_logprob_distance:.1e} (mean {result.mean_logprob_distance:.1e})"
    calls = " ".join(map(str, result.calls_per_rank)) if result.layers else "-"
    if any(result.runs_per_rank):
        calls += f" ({' '.join(map(str, result.runs_per_rank))} on the device)"
    if not result.ran:
        calls = f"[red]{calls}: other code ran[/red]"
    seen = {None: "-", True: "noticed", False: "[red]not noticed[/red]"}
    if not math.isfinite(result.max_logprob_distance):
        distance = f"[red]{distance}[/red]"
    return (
        result.stage,
        f"{result.ranks} {mode}",
        ids_words(result),
        "-" if result.stage == NATIVE and result.right else distance,
        calls,
        seen[result.sabotage_seen],
        speed(result),
    )


def ids_words(result: StageResult) -> str:
    """Red where it is wrong; the yardstick's text may differ."""
    if not result.agreed:
        return "[red]tensor-parallel ranks differ[/red]"
    words = difference_words(result)
    return words if result.equal or result.right else f"[red]{words}[/red]"


def difference_words(result: StageResult) -> str:
    """Where the texts part, and how near a tie it was."""
    found = result.difference
    if found is None:
        return "equal"
    tie = "" if found.gap is None else f", which native finds {found.gap:.1e} likelier"
    return f"prompt {found.prompt}, token {found.position}: {found.found} for {found.expected}{tie}"


def speed(result: StageResult) -> str:
    if result.against_native is None:
        return "-"
    median, low, high = result.against_native
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def picture(comparison: Comparison) -> Picture:
    """Speed against native with intervals where it was measured, else how far log-probabilities are off."""
    timed = any(result.against_native for result in comparison.results)
    rows = [r for r in comparison.results if r.stage != NATIVE]
    figure, axes = canvas(64, 6 + 4 * len(rows))
    ends = [_value(r, timed)[2] for r in rows]
    biggest = max((end for end in ends if math.isfinite(end)), default=0.0) or 1.0
    left, width = 20.0, 30.0
    for place, result in enumerate(rows):
        middle, low, high = _value(result, timed)
        y = 4 + 4 * place
        colour = BLUE if result.right else RED
        axes.text(left - 1, y, result.stage, ha="right", va="center", color=INK, size=SMALL)
        drawn = middle if math.isfinite(middle) else 0.0
        axes.barh(y, width * drawn / biggest, 2.2, left=left, color=colour, alpha=0.75)
        if timed:
            axes.plot([left + width * v / biggest for v in (low, high)], [y, y], color=INK, lw=1)
        words = (
            f"{middle:.2f}"
            if timed
            else f"{middle:.1e}, ids {'equal' if result.equal else 'differ'}"
        )
        end = left + width * max(drawn, high if timed else drawn) / biggest + 0.8
        axes.text(end, y, words, va="center", color=MUTED, size=SMALL)
    if timed:
        axes.axvline(left + width / biggest, color=ORANGE, lw=0.8)
    axes.plot([left, left], [2, 4 * len(rows) + 2], color=FAINT, lw=0.8)
    what = (
        "tokens per second, native vLLM = 1"
        if timed
        else "largest distance of a log-probability from native vLLM's"
    )
    axes.text(left, 4 * len(rows) + 3.6, what, color=MUTED, size=SMALL, va="center")
    says = "; ".join(f"{r.stage}: {_value(r, timed)[0]:.2g}" for r in rows)
    return Picture(figure, f"{what}. {says}")


def _value(result: StageResult, timed: bool) -> tuple[float, float, float]:
    if timed:
        return result.against_native or (0.0, 0.0, 0.0)
    distance = result.max_logprob_distance
    return distance, distance, distance
