"""The generated Markdown pages: one per result, with its tables and plots, and the index."""

from collections.abc import Mapping, Sequence

from epmoe.core.bench import plots, view
from epmoe.core.bench.floors import operations_per_assignment
from epmoe.core.bench.padding import PaddingRow
from epmoe.core.bench.profile import products_us
from epmoe.core.bench.results import Measured, Point, Result, timed_subjects
from epmoe.core.bench.routers import FUSED

_MADE = "<!-- made by `epmoe bench report`: change the results, not this page -->\n"


def result_pages(name: str, result: Result, folder: str) -> dict[str, str]:
    """path -> text: the page of one layer result, and its plots."""
    subjects = list(dict.fromkeys(n for p in result.points for n in p.subjects))
    timed = [n for n in subjects if any(n in timed_subjects(p) for p in result.points)]
    files, pictures = {}, []
    if timed and result.setting["clock"] == "CUDA events":
        files[f"{folder}/{name}-floor.svg"] = plots.floor_plot(result)
        pictures.append(f"![time over floor]({name}-floor.svg)")
    ours = _last_stage(timed)
    if ours and len(timed) > 1:
        files[f"{folder}/{name}-ratio.svg"] = plots.ratio_plot(result, ours)
        pictures.append(f"![time of {ours} over the others]({name}-ratio.svg)")
    parts = [
        f"# {name}\n",  # short: the site lists these in a narrow column
        _MADE,
        f"{view.title(result)}.\n",
        _provenance(result),
        *(picture + "\n" for picture in pictures),
        "## Times\n",
        _times(result, subjects),
        "## Ratios\n",
        _ratios(result),
        _profiles(result),
        _notes(result),
    ]
    files[f"{folder}/{name}.md"] = "\n".join(part for part in parts if part)
    return files


def _last_stage(names: Sequence[str]) -> str | None:
    stages = [name for name in names if name[:1].isdigit() and ":" not in name]
    return max(stages, default=None)


def _unequal_routers(result: Result) -> list[str]:
    """A warning where the stages that route in a kernel of their own met others that route in torch operators."""
    subjects = {n: one for p in result.points for n, one in p.subjects.items()}
    own = [name for name, one in subjects.items() if _routes_itself(one)]
    others = [name for name in subjects if name not in own]
    if not own or not others or result.setting["router"] != "torch":
        return []
    return [
        f"- NOT the same router: {', '.join(own)} routed in a kernel of their own, {', '.join(others)} with "
        "torch operators, so part of what separates them is the router"
    ]


def _routes_itself(one: Measured) -> bool:
    """Router and pack are one kernel: without either of them the layer routes in torch operators."""
    fusions = one.describe.get("fusions")
    whole = fusions is None or {"router", "pack"} <= set(fusions)
    return whole and one.describe.get("router") == FUSED


def _provenance(result: Result) -> str:
    machine, setting = result.machine, result.setting
    versions = ", ".join(
        f"{name} {machine[name]}"
        for name in ("driver", "torch", "triton", "nccl", "vllm")
        if machine.get(name)
    )
    dirty = " with local changes" if machine["git_dirty"] else ""
    read = result.ceiling["read_bytes_per_second"] / 1e12
    copy = result.ceiling["copy_bytes_per_second"] / 1e12
    return "\n".join(
        [
            f"- taken {result.created} at commit `{machine['git_sha'][:12]}`{dirty}: `{result.command}`",
            f"- {machine['device']}; {versions}; clocks before {_clocks(result, 'before')}, "
            f"after {_clocks(result, 'after')}",
            f"- this run read memory at {read:.2f} TB/s and copied at {copy:.2f} TB/s",
            f"- {setting['blocks']} interleaved blocks of {setting['replays']} replays, {setting['layers']} layers "
            f"in a chain, {setting['draws']} draws, router: {setting['router']}; clock: {setting['clock']}",
            *_unequal_routers(result),
            "",
        ]
    )


def _clocks(result: Result, when: str) -> str:
    found = result.clocks.get(when) or {}
    words = f"{found.get('sm_mhz')} MHz, {found.get('power_w')} W"
    return words if found else "not known"


def _times(result: Result, subjects: Sequence[str]) -> str:
    lines = [
        "| T | active experts | floor, us | " + " | ".join(subjects) + " |",
        "|---:|---:|---:|" + "---:|" * len(subjects),
    ]
    for point in result.points:
        cells = [_time(point.subjects.get(name)) for name in subjects]
        active, least = view.active_words(point, result), view.mean_floor(point)
        lines.append(f"| {point.tokens} | {active} | {least:.1f} | " + " | ".join(cells) + " |")
    nominal, read = (
        bandwidth / 1e12
        for bandwidth in (
            result.setting["floor_bytes_per_second"],
            result.ceiling["read_bytes_per_second"],
        )
    )
    note = (
        f"\nMicroseconds per layer, mean over draws; then time / floor [95% interval], divided draw by draw and then "
        "averaged, so it is not the quotient of the two columns; then TFLOP/s of the expert products. The floor is the "
        f"longer of reading the active experts at {nominal:.2f} TB/s and their arithmetic at the peak; at the "
        f"{read:.2f} TB/s that this run read, time / floor of reading is {read / nominal:.2f} times as high."
    )
    return "\n".join([*lines, note, ""])


def _time(one: Measured | None) -> str:
    if one is None:
        return "-"
    if one.error is not None or not one.over_floor or one.median_us is None:
        return "failed"
    middle, low, high = one.over_floor
    mode = ", eager" if one.mode == "eager" else ""
    return f"{one.median_us:.1f}; {middle:.2f} [{low:.2f}, {high:.2f}]; {one.tflops:.1f}{mode}"


def _ratios(result: Result) -> str:
    pairs = list(dict.fromkeys((r.of, r.to) for p in result.points for r in p.ratios))
    if not pairs:
        return "There was nothing to compare.\n"
    lines = [
        "| time of / time of | " + " | ".join(f"T = {p.tokens}" for p in result.points) + " |",
        "|---|" + "---:|" * len(result.points),
    ]
    for of, to in pairs:
        lines.append(
            f"| {of} / {to} | " + " | ".join(_ratio(p, of, to) for p in result.points) + " |"
        )
    note = (
        "\nMedian of per-block ratios [bootstrap 95% interval]; below 1 the first is faster. Bold: the interval "
        "excludes 1 and the effect is at least 2%."
    )
    return "\n".join([*lines, note, ""])


def _ratio(point: Point, of: str, to: str) -> str:
    found = next((r for r in point.ratios if (r.of, r.to) == (of, to)), None)
    if found is None:
        return "-"
    words = f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]"
    return words if found.claim == "no difference" else f"**{words}**"


def _profiles(result: Result) -> str:
    """Where the time goes, subject by subject; nothing where nobody looked."""
    lines = [
        f"| {point.tokens} | {name} | {_profile(one, point, result)} |"
        for point in result.points
        for name, one in point.subjects.items()
        if one.profile
    ]
    if not lines:
        return ""
    head = [
        "## Where the time goes\n",
        "| T | subject | span | exchange | wait | products | TFLOP/s | launches | kernels |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    note = (
        "\nMicroseconds per layer on draw 0, mean over ranks, by torch's profiler, apart from the timed runs (profiled "
        "runs are slower). Exchange: NCCL kernels, each as short as on the rank that came last; wait: what they took "
        "above that; products: the experts' matrix products, and their rate. A kernel counts from its start, even "
        "while it waits for the one before: the sum may exceed the span."
    )
    return "\n".join([*head, *lines, note, ""])


def _profile(one: Measured, point: Point, result: Result) -> str:
    found = one.profile
    kernels = ", ".join(f"{name} {us:.1f}" for name, us in found["kernels_us"].items())
    cells = [f"{found[part]:.1f}" for part in ("span_us", "exchange_us", "wait_us")]
    products = products_us(found["kernels_us"])
    rate = f"{_operations(point, result) / products / 1e6:.0f}" if products else "-"
    return " | ".join([*cells, f"{products:.1f}", rate, f"{found['launches']:.0f}", kernels])


def _operations(point: Point, result: Result) -> float:
    """Of the expert products of one rank on draw 0, the mean where several ranks were looked at."""
    by_rank, played = point.draws[0].assignments, result.setting["rank"]
    rows = by_rank[played] if result.setting["loopback"] else sum(by_rank) / len(by_rank)
    return operations_per_assignment(result.setting) * rows


def _notes(result: Result) -> str:
    notes: dict[str, None] = {}
    for point in result.points:
        notes |= {f"- refused: {name}: {why}": None for name, why in point.refused.items()}
        notes |= {
            f"- failed at T = {point.tokens}: {name}: {one.error}": None
            for name, one in point.subjects.items()
            if one.error
        }
    notes |= {f"- not measured: T = {t}: {why}": None for t, why in result.skipped.items()}
    return "\n".join(["## Not measured\n", *notes, ""]) if notes else ""


def padding_pages(
    name: str, head: Mapping[str, object], rows: Sequence[PaddingRow], folder: str
) -> dict[str, str]:
    """path -> text: the padding page and its plot."""
    stages = list(dict.fromkeys(row.stage for row in rows))
    lines = [
        "| EP | routing | T | " + " | ".join(stages) + " |",
        "|---:|---|---:|" + "---:|" * len(stages),
    ]
    for ep, routing, tokens in dict.fromkeys((r.ep, view.routing_words(r), r.tokens) for r in rows):
        found = {
            r.stage: r
            for r in rows
            if (r.ep, view.routing_words(r), r.tokens) == (ep, routing, tokens)
        }
        cells = [view.padding_cell(found[s]) if s in found else "-" for s in stages]
        lines.append(f"| {ep} | {routing} | {tokens} | " + " | ".join(cells) + " |")
    most = max(row.ep for row in rows)
    page = [
        "# Rows sent and computed against rows needed\n",
        _MADE,
        f"Counted by the ledger on CPU ranks ({head['shape']}, {head['draws']} draws each, commit "
        f"`{str(head['git_sha'])[:12]}`): `{head['command']}`\n",
        f"![rows computed per row needed at EP {most}]({name}.svg)\n",
        *lines,
        "\nRows sent per row needed, then rows computed per row needed.\n",
    ]
    return {
        f"{folder}/{name}.md": "\n".join(page),
        f"{folder}/{name}.svg": plots.padding_plot(rows, most),
    }


def index(measured: Mapping[str, Result], counted: Mapping[str, object], not_measured: str) -> str:
    """The list of pages."""
    lines = [f"- [{name}: {view.title(result)}]({name}.md)" for name, result in measured.items()]
    lines = lines or [f"- times: {not_measured}"]
    lines += [f"- [rows sent and computed against rows needed]({name}.md)" for name in counted]
    if not counted:
        lines.append(f"- padding: {not_measured}")
    return "\n".join(["# Measurements\n", _MADE, *lines, ""])
