"""`epmoe bench`, `epmoe bench padding`, `epmoe bench report`."""

import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from epmoe.core import groups
from epmoe.core.bench import progress, results, vllm_subjects
from epmoe.core.bench import remember as keeping
from epmoe.core.bench.run import Config, estimate_seconds, run
from epmoe.core.bench.subjects import resolve_names
from epmoe.core.bench.view import render
from epmoe.core.bench.workload import Routing
from epmoe.core.commands.terminal import (
    Device,
    Dtype,
    Json,
    JsonInNewFolder,
    Seed,
    answers,
    deliver,
    deliver_text,
    notes,
    time_limit,
    whole_numbers,
    writable_in_new_folder,
)
from epmoe.core.launch import launch
from epmoe.core.ranks.torchrun import speaks, under_torchrun, world_size
from epmoe.core.ranks.transport import one_device


class _RunByDefault(TyperGroup):
    """`epmoe bench --ep 4` is `epmoe bench run --ep 4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="Measure layers against the floor and against others, with gates before every time.",
    rich_markup_mode=None,
)


@app.command("run")
def run_command(
    shape: Annotated[str, typer.Option(help="A named shape.")] = "glm-5.3-flash",
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 4,
    placement: Annotated[
        str, typer.Option(help="contiguous, round_robin, or a file of `epmoe balance --json`.")
    ] = "contiguous",
    loopback: Annotated[
        bool, typer.Option("--loopback", help="One process plays one of the ranks.")
    ] = False,
    rank: Annotated[int, typer.Option(help="Which rank loopback plays.")] = 0,
    tokens: Annotated[str, typer.Option(help="T per rank, with commas.")] = "1,2,4,8,16,32,64,128",
    subjects: Annotated[
        str,
        typer.Option(
            help="Stages, grouped_mm, vllm-default, vllm-tuned, vllm-agrs, vllm-agrs-tuned; or auto."
        ),
    ] = "auto",
    draws: Annotated[int, typer.Option(min=1, help="Routing draws.")] = 5,
    blocks: Annotated[int, typer.Option(min=1, help="Interleaved blocks, over all draws.")] = 20,
    replays: Annotated[int, typer.Option(min=1, help="Replays per block.")] = 50,
    layers: Annotated[
        int, typer.Option(min=1, help="Layers with weights of their own in one chain.")
    ] = 4,
    routing: Annotated[
        str, typer.Option(help="uniform, zipf, hot_expert or one_rank.")
    ] = "uniform",
    skew: Annotated[float, typer.Option(help="Exponent of zipf.")] = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    router: Annotated[
        str, typer.Option(help="auto, torch, or a stage whose router kernel all subjects share.")
    ] = "auto",
    gpu: Annotated[str, typer.Option(help="Whose bandwidth floors are quoted at.")] = "h200",
    rows: Annotated[int, typer.Option(min=1, help="Rows per layer that the oracle checks.")] = 4,
    vllm_sweep: Annotated[
        int, typer.Option(min=0, help="vLLM configurations to try per T; 0 for none.")
    ] = 8,
    vllm_config: Annotated[
        Path | None, typer.Option(help="Chosen vLLM configurations, in vLLM's format; no sweep.")
    ] = None,
    save_vllm_config: Annotated[
        Path | None,
        typer.Option(help="Where to write what the sweep chose.", callback=writable_in_new_folder),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record kernel times too: where the time goes.")
    ] = False,
    remember: Annotated[
        bool, typer.Option("--remember", help="Keep the times of stages where `auto` looks.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="Start no new T after so many seconds.", callback=time_limit),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for everything, several ranks.", callback=time_limit)
    ] = 1800.0,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say how long the timed part takes, and stop.")
    ] = False,
    json_to: JsonInNewFolder = None,
) -> None:
    """Time subjects from router logits to the combined output, interleaved, each behind its gates."""
    ep = ep if loopback else world_size(ep)
    config = Config(
        shape=shape,
        ep=ep,
        placement=placement,
        loopback=loopback,
        rank=rank,
        tokens=whole_numbers("tokens", tokens, least=1),
        subjects=tuple(subjects.split(",")),
        draws=draws,
        blocks=blocks,
        replays=replays,
        layers=layers,
        routing=Routing(kind=routing, skew=skew),
        seed=seed,
        dtype=dtype,
        router=router,
        gpu=gpu,
        rows=rows,
        sweep=vllm_sweep,
        configs=vllm_subjects.read_configs(vllm_config) if vllm_config else None,
        profile=profile,
        seconds=seconds,
        path=Path(json_to) if json_to not in (None, "-") else None,
        command=shlex.join(["epmoe", *sys.argv[1:]]),
    )
    if estimate:
        count = len(resolve_names(config.subjects, 1 if loopback else ep))
        answers.print(
            f"about {estimate_seconds(config, count):.0f} s of timing for {count} subjects on {gpu}; set-up, gates, "
            "compilation and tuning come on top"
        )
        return
    if remember:
        keeping.check(device, ep, loopback, placement)
    result = _run(config, device, timeout)
    _show(result, json_to)
    _keep(result, remember, save_vllm_config)
    raise typer.Exit(_exit_code(result))


def _run(config: Config, device: str, timeout: float) -> results.Result:
    if config.loopback or (config.ep == 1 and not under_torchrun()):
        return run(groups.single(one_device(device)), config)
    # under torchrun rank 0 writes to the user's standard error itself
    with nullcontext() if under_torchrun() else progress.followed() as path:
        config = replace(config, progress=path)
        return launch(run, config, ranks=config.ep, device=device, timeout=timeout)[0]


def _show(result: results.Result, json_to: str | None) -> None:
    # a file holds it already: every T is written when it is done
    deliver_text(result.text(), "-" if json_to == "-" else None, render(result))


def _keep(result: results.Result, remember: bool, save_vllm_config: Path | None) -> None:
    """Into the files that were asked for besides, on rank 0."""
    if save_vllm_config and result.tuning and speaks():
        chosen = {tuned["rows"]: tuned["best"] for tuned in result.tuning.values()}
        vllm_subjects.write_configs(save_vllm_config, chosen)
    if remember and speaks():
        notes.print(keeping.keep(result), style="dim", highlight=False)


def _exit_code(result: results.Result) -> int:
    """1 when a subject failed its gates, and when nobody got that far."""
    subjects = [one for point in result.points for one in point.subjects.values()]
    if not subjects:
        notes.print("nothing was measured: no subject ran at any T")
    return 1 if not subjects or any(one.error for one in subjects) else 0


@app.command("padding")
def padding_command(
    stages: Annotated[str, typer.Option(help="Stages, with commas.")] = "00,01,02,03",
    shape: Annotated[str, typer.Option(help="A named shape; a small one.")] = "tiny",
    tokens: Annotated[str, typer.Option(help="T per rank, with commas.")] = "1,4,16",
    ep: Annotated[str, typer.Option(help="Ranks, with commas; up to 4 is quick.")] = "2,4",
    routings: Annotated[
        str, typer.Option(help="Kinds, with commas; zipf:1.0 gives the exponent.")
    ] = "uniform,zipf:0.6,zipf:1.0,hot_expert,one_rank",
    draws: Annotated[int, typer.Option(min=1, help="Draws to average over.")] = 3,
    timeout: Annotated[
        float, typer.Option(help="Seconds for each count.", callback=time_limit)
    ] = 120.0,
    json_to: Json = None,
) -> None:
    """Count rows sent and computed against rows needed, on real CPU ranks."""
    from epmoe.core.bench import padding
    from epmoe.core.bench.view import render_padding

    counted = padding.sweep(
        stages.split(","),
        shape,
        whole_numbers("tokens", tokens, least=1),
        whole_numbers("ep", ep, least=1),
        [Routing.parse(word) for word in routings.split(",")],
        draws,
        timeout,
    )
    command = shlex.join(["epmoe", *sys.argv[1:]])
    deliver(padding.document(counted, shape, draws, command), json_to, render_padding(counted))


@app.command("report")
def report_command(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 1 when something is stale.")
    ] = False,
    root: Annotated[
        Path | None, typer.Option(help="The repository; where the command runs by default.")
    ] = None,
) -> None:
    """Make README's ladder table and the pages under docs/ladder from the committed results."""
    from epmoe.core.bench import report

    stale = report.generate(report.find_root(root), check=check)
    for problem in stale:
        answers.print(("stale: " if check else "wrote ") + problem, highlight=False, markup=False)
    if not stale:
        answers.print("everything is up to date")
    raise typer.Exit(1 if check and stale else 0)
