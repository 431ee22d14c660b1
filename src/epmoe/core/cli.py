"""`epmoe`: the front door on a terminal. `--json` prints JSON, `--json FILE` writes it."""

import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from epmoe.core import registry
from epmoe.core.bench.cli import app as bench
from epmoe.core.commands.balance import balance_command
from epmoe.core.commands.terminal import (
    Device,
    Dtype,
    Json,
    Ranks,
    deliver,
    notes,
    quiet_pipe,
    text_of,
    time_limit,
    writable_in_new_folder,
)
from epmoe.core.commands.vllm import app as vllm
from epmoe.core.errors import EpmoeError, InputError
from epmoe.core.plan.render import plan_command
from epmoe.core.ranks.torchrun import world_size
from epmoe.core.timeline.cli import trace_command

app = typer.Typer(
    help="A ladder of expert-parallel Mixture-of-Experts layers: run it, check it, measure it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script: bad input ends with one clear line and exit code 2."""
    sys.argv[1:] = _complete_json(sys.argv[1:])
    with quiet_pipe():
        try:
            app()
        except EpmoeError as error:
            _tell(error)
            sys.exit(2)


def _tell(error: EpmoeError) -> None:
    """What went wrong; the ranks' tracebacks only where the input is not to blame."""
    notes.print(f"epmoe: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
    for note in getattr(error, "__notes__", ()):
        words = note.partition("\n")[0].rstrip(":") if isinstance(error, InputError) else note
        notes.print(words, highlight=False, markup=False)


def _version(asked: bool) -> None:
    if asked:
        print(f"epmoe {version('epmoe')}")
        raise typer.Exit


@app.callback()
def epmoe(
    asked: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Say it, and end."),
    ] = False,
) -> None:
    """Options before a command."""


def _complete_json(arguments: list[str]) -> list[str]:
    """A bare `--json` means standard output: give it the value `-`."""
    completed = []
    for place, argument in enumerate(arguments):
        completed.append(argument)
        following = arguments[place + 1 : place + 2]
        if argument == "--json" and (not following or following[0].startswith("--")):
            completed.append("-")
    return completed


@app.command()
def tour(
    ranks: Ranks = 4,
    device: Device = "auto",
    stage: Annotated[
        list[str] | None, typer.Option(help="Stages, with commas. All by default.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to read instead of the built-in one.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens of the text.")] = 96,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint. The tiny one by default.")
    ] = None,
    dtype: Dtype = "auto",
    timeout: Annotated[
        float, typer.Option(help="Seconds for each stage.", callback=time_limit)
    ] = 120.0,
    json_to: Json = None,
) -> None:
    """Run one real MoE layer on real text through every stage, and hold each rank against the oracle."""
    from epmoe.core import tour as tours
    from epmoe.core.tour.guide import guide
    from epmoe.core.tour.view import render

    stages = tours.runnable_stages(stage or [])
    words = text_of(text) if text else tours.TEXT
    report = guide(
        notes,
        stages,
        world_size(ranks),
        device,
        tours.find_model(model),
        words,
        tokens,
        dtype,
        timeout,
    )
    deliver(asdict(report) | {"right": report.right}, json_to, render(report))
    raise typer.Exit(0 if report.right else 1)


@app.command()
def check(
    stage: Annotated[str, typer.Argument(help="A registered stage: its name or number.")],
    shape: Annotated[str, typer.Option(help="A named shape.")] = "tiny",
    tokens: Annotated[
        str, typer.Option(help="T of every call, with commas; rank r brings T - r.")
    ] = "0,1,5,33",
    draw: Annotated[
        str,
        typer.Option(help="uniform, zipf, hot_expert, one_rank, masked or duplicates; or all."),
    ] = "all",
    placement: Annotated[
        str, typer.Option(help="contiguous, round_robin, or a file of `epmoe balance --json`.")
    ] = "contiguous",
    ranks: Ranks = 4,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds of each draw.")] = 2,
    timeout: Annotated[
        float, typer.Option(help="Seconds for each case.", callback=time_limit)
    ] = 120.0,
    json_to: Json = None,
) -> None:
    """Hold a stage against the oracle on every rank, with random draws. Exit code 1 when it is wrong."""
    from epmoe.core.commands import check as checking

    cases = checking.cases(
        registry.resolve(stage), shape, tokens, draw, world_size(ranks), seeds, placement
    )
    outcomes = checking.run(notes, cases, ranks, device, dtype, timeout)
    right = all(outcome.right for outcome in outcomes)
    data = {"stage": stage, "right": right, "cases": [o.as_dict() for o in outcomes]}
    deliver(data, json_to, checking.render(outcomes))
    raise typer.Exit(0 if right else 1)


@app.command()
def tune(
    stage: Annotated[str, typer.Option(help="A stage that has something to tune.")] = "03",
    shape: Annotated[str, typer.Option(help="A named shape.")] = "glm-5.3-flash",
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 4,
    tokens: Annotated[str, typer.Option(help="T per rank, with commas.")] = "1,8,32,128",
    loopback: Annotated[
        bool, typer.Option("--loopback", help="One process plays one of the ranks.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    candidates: Annotated[
        int, typer.Option(min=1, help="How many tiles to try of each product.")
    ] = 40,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file; by default the one that layers read.", callback=writable_in_new_folder
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for each T, several ranks.", callback=time_limit)
    ] = 900.0,
    json_to: Json = None,
) -> None:
    """Measure tile sizes on the expert group, slowest rank counts; layers look them up. Goes on where it stopped."""
    from epmoe.core.commands.tune import guide

    data, table = guide(
        notes, stage, shape, ep, tokens, loopback, device, dtype, candidates, out, timeout
    )
    deliver(data, json_to, table)


@app.command()
def stages(
    context: typer.Context,
    why: Annotated[
        bool, typer.Option("--why", help="Which one serves best here, and why not each other.")
    ] = False,
    device: Device = "auto",
    arch: Annotated[
        str | None, typer.Option(help="Compute capability, such as 7.5; this GPU's by default.")
    ] = None,
    dtype: Dtype = "auto",
    shape: Annotated[str, typer.Option(help="A named shape.")] = "glm-5.3-flash",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="EP; by default one for each GPU here.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="T per rank.")] = 8,
    transport: Annotated[
        str | None, typer.Option(help="single, gloo, nccl or loopback; by ranks and device.")
    ] = None,
    placement: Annotated[str, typer.Option(help="The kind of expert map.")] = "contiguous",
    graph: Annotated[bool, typer.Option("--graph", help="In CUDA graphs.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits, call after call.")
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="The same bits in every batch.")
    ] = False,
    maskable: Annotated[
        bool, typer.Option("--maskable", help="Ranks can be masked between calls.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="Bytes for buffers on a rank, such as 300MiB.")
    ] = None,
    json_to: Json = None,
) -> None:
    """List the registered stages and what they declare; with --why, choose. Exit code 1 when none can."""
    from epmoe.core.commands import stages as stages_cli

    if not why:
        stages_cli.refuse_questions(context)
        data, table = stages_cli.listing()
        return deliver(data, json_to, table)
    spec = stages_cli.situation(
        device=device, arch=arch, dtype=dtype, shape=shape, ranks=ranks, tokens=tokens,
        transport=transport, placement=placement, graph=graph, deterministic=deterministic,
        batch_invariant=batch_invariant, maskable=maskable, memory=memory,
    )  # fmt: skip
    data, table = stages_cli.why(spec)
    deliver(data, json_to, table)
    raise typer.Exit(0 if data["chosen"] else 1)


@app.command()
def doctor(json_to: Json = None) -> None:
    """What this machine can run, and why not the rest."""
    from epmoe.core.commands.doctor import diagnose, render

    findings = diagnose()
    deliver([asdict(finding) for finding in findings], json_to, render(findings))


app.command("plan")(plan_command)
app.command("balance")(balance_command)
app.command("trace")(trace_command)
app.add_typer(bench, name="bench")
app.add_typer(vllm(), name="vllm")
