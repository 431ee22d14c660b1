"""`epmoe trace`: what a layer's time is spent on, as a trace for Perfetto, a table, and the site's stepper."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text as Words

from epmoe.core import phase_times, registry, routing_stats, traces
from epmoe.core.bench.workload import Routing
from epmoe.core.checkpoints import hidden_states, inspect
from epmoe.core.commands.terminal import (
    Device,
    Dtype,
    Json,
    deliver,
    notes,
    time_limit,
    writable,
    write_answer,
)
from epmoe.core.errors import InputError
from epmoe.core.launch import RankPool, open_ranks
from epmoe.core.placement import parse_placement
from epmoe.core.ranks.torchrun import WorldRanks, speaks, under_torchrun, world_size
from epmoe.core.room import counted
from epmoe.core.shape import named_shape
from epmoe.core.timeline import Report, Run, Text, record_rank, report_of
from epmoe.core.timeline.events import chrome_trace
from epmoe.core.tour import TEXT
from epmoe.core.values import named_dtype

_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer's mean, so that the text suffices


def trace_command(
    stage: Annotated[str, typer.Argument(help="A registered stage, or exchange+experts.")],
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="T per rank.")] = 8,
    calls: Annotated[int, typer.Option(min=1, help="How many calls to time.")] = 5,
    shape: Annotated[str, typer.Option(help="A named shape, with random weights.")] = "tiny",
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint instead: its middle MoE layer, on text.")
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(help="uniform, zipf:1.0, hot_expert or one_rank; uniform by default."),
    ] = None,
    placement: Annotated[
        str, typer.Option(help="contiguous, round_robin or a file.")
    ] = "contiguous",
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Annotated[
        Path, typer.Option(help="Where the trace for ui.perfetto.dev goes.", callback=writable)
    ] = Path("trace.json"),
    stepper: Annotated[
        Path | None,
        typer.Option(
            help="Also a few tokens row by row, for the site's stepper.", callback=writable
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for all calls.", callback=time_limit)
    ] = 300.0,
    json_to: Json = None,
) -> None:
    """Time every phase of a few calls on every rank: a trace, a table, and where the tokens went."""
    stage, ranks = registry.resolve(stage), world_size(ep)
    drawn = Routing.parse(routing or "uniform")
    scenario = _scenario(ranks, drawn.kind) if stepper else None
    if model and routing:
        raise InputError(f"routing={routing!r}: a model routes by itself, leave --routing out")
    layer_shape = inspect(model).shape if model else named_shape(shape)
    placed = parse_placement(placement, layer_shape.experts, ranks)
    with open_ranks(ep, device) as pool:  # the ranks start while the model reads
        text = _text(model, ranks * tokens) if model else None
        run = Run(
            stage=stage,
            shape=layer_shape,
            placement=placed,
            tokens=-(-len(text.x_TH) // ranks) if text else tokens,
            calls=calls,
            routing=drawn,
            dtype=named_dtype(dtype, pool.choice.device_type),
            text=text,
        )
        records = pool.run(record_rank, run, timeout=timeout)
        report = report_of(run, _sentence(run), pool.describe(), records)
        played = _play(pool, stage, scenario) if scenario else None
    if speaks():
        _write(out, chrome_trace(records, report), "open it at https://ui.perfetto.dev")
    if stepper and played:
        name = played["scenario"]["name"]
        _write(stepper, played, f"{len(played['tokens'])} tokens row by row, {name}")
    deliver(report.as_dict(), json_to, render(report))


def render(report: Report) -> RenderableType:
    """The tables of a trace, and how to read them."""
    within = f"The ranks' clocks agree within {report.aligned_within * 1e6:,.0f} us."
    skipped = (
        f" {report.skipped} phases ran inside a graph capture and were not timed."
        if report.skipped
        else ""
    )
    return Group(
        Words(report.what, "bold"),
        Words(report.where),
        phase_times.render(report.times),
        Words(
            "Microseconds per call, the median of the calls. pack and merge: dispatch and combine without their "
            f"exchanges; waiting: exchanges above the rank where they were shortest. {within}{skipped}\n"
        ),
        routing_stats.render(report.routing, report.active),
        Words(f"{report.computed:,} rows went through an expert, padding included."),
    )


def _write(path: Path, data: dict, words: str) -> None:
    write_answer(path, json.dumps(data) + "\n")
    notes.print(f"{path}: {words}", highlight=False)


def _scenario(ranks: int, routing: str) -> traces.Scenario:
    """What the stepper plays. Raises InputError where it plays no such thing."""
    if under_torchrun():
        raise InputError("--stepper starts ranks of its own: run it without torchrun")
    if ranks not in traces.TOKENS:
        raise InputError(
            f"--stepper plays {', '.join(map(str, traces.TOKENS))} ranks, not {ranks}: change --ep"
        )
    return traces.Scenario(ranks=ranks, experts=8, topk=2, routing=routing)


def _play(pool: RankPool | WorldRanks, stage: str, scenario: traces.Scenario) -> dict:
    """A trace of a few drawn tokens, always on CPU ranks: rows are the same on every machine."""
    if isinstance(pool, RankPool) and pool.choice.device_type == "cpu":
        return traces.small(traces.trace_stage(pool, stage, scenario))
    with RankPool(scenario.ranks, "cpu") as ranks:
        return traces.small(traces.trace_stage(ranks, stage, scenario))


def _text(model: Path, tokens: int) -> Text:
    """At most so many tokens of the tour's text, as they enter the model's middle MoE layer."""
    layers = inspect(model).moe_layers
    layer = layers[len(layers) // 2]
    words = TEXT * (1 + _CHARACTERS_PER_TOKEN * tokens // len(TEXT))
    return Text(model=model, layer=layer, x_TH=hidden_states(model, layer, words, tokens))


def _sentence(run: Run) -> str:
    sizes, text = run.shape, run.text
    of = f"layer {text.layer} of {text.model.name}" if text else f"{sizes.name} with random weights"
    given = "text" if text else f"{run.routing} routing"
    return (
        f"{run.stage}, {of}: {sizes.experts} experts, {sizes.topk} per token, H={sizes.hidden}, "
        f"I={sizes.intermediate}; T={run.tokens}, {given}, {counted(run.calls, 'call')}"
    )
