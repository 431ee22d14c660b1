"""`epmoe vllm`: compare stages inside vLLM, or one of its MoE layers without an engine."""

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from epmoe.core.commands.terminal import Json, deliver, notes, time_limit, whole_numbers, writable
from epmoe.core.errors import InputError

app = typer.Typer(
    help="Stages inside vLLM, held against vLLM's own experts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _plot_file(path: Path | None) -> Path | None:
    """Callback of `--plot`: found out before a comparison runs."""
    if path is not None and path.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {path}: give a file that ends in .svg or .png")
    return writable(path)


Python = Annotated[
    str | None,
    typer.Option(help="A Python that has vLLM. This one, or .venv-vllm of a clone, by default."),
]
Model = Annotated[Path, typer.Option(help="Folder of a checkpoint.", exists=True, file_okay=False)]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


@app.command()
def compare(
    model: Model,
    stages: Annotated[str, typer.Option(help="Names or numbers, with commas.")] = "native,01,02,03",
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 16,
    dp: Annotated[
        int, typer.Option(min=1, help="Data-parallel ranks, experts spread over them.")
    ] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    spread: Annotated[
        str, typer.Option(help="How ranks share prompts: uneven, even or one.")
    ] = "uneven",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "float32",
    device: Device = "cpu",
    compiled: Annotated[
        bool, typer.Option(help="torch.compile and CUDA graphs, as vLLM runs by default.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Fresh engines per stage, in turn.")] = 1,
    repeats: Annotated[int, typer.Option(min=0, help="Timed generations in each of them.")] = 0,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="All engines at the same time, on a GPU; no times.")
    ] = False,
    sabotage: Annotated[
        int | None, typer.Option(help="Spoil this expert once more in each run.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help='A stage\'s options: 03={"without": "merge"}. Repeat.')
    ] = None,
    engine: Annotated[str, typer.Option(help="More arguments for vLLM's LLM, as JSON.")] = "{}",
    length: Annotated[int, typer.Option(min=8, help="max_model_len and tokens per step.")] = 256,
    timeout: Annotated[
        float, typer.Option(help="Seconds for each run.", callback=time_limit)
    ] = 300.0,
    python: Python = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the plot: .svg or .png.", callback=_plot_file)
    ] = None,
    json_to: Json = None,
) -> None:
    """Run the same prompts with vLLM's own experts and with each stage's. Exit code 1 where one is wrong."""
    from epmoe.vllm_plugin import compare as comparing
    from epmoe.vllm_plugin import engines, view

    plan = comparing.Plan(
        model=str(model),
        stages=comparing.resolve_stages(stages),
        prompts=comparing.read_prompts(prompts) if prompts else comparing.PROMPTS,
        tokens=tokens,
        dp=dp,
        tp=tp,
        spread=spread,
        dtype=dtype,
        device=device,
        compiled=compiled,
        rounds=rounds,
        repeats=repeats,
        sabotage=sabotage,
        timeout=timeout,
        options=_stage_options(option or ()),
        engine=_json(engine, "--engine"),
        at_once=at_once,
    )
    limited = comparing.with_limits(plan, length)
    with _leaving_on_sigterm():
        found = comparing.compare(limited, engines.find_python(python), _say)
    deliver(found.as_dict(), json_to, view.with_last_words(found))
    if plot:
        view.picture(found).save(plot)
    raise typer.Exit(0 if found.right else 1)


@app.command()
def layer(
    model: Model,
    index: Annotated[
        int | None, typer.Option("--layer", help="Its index; the first MoE layer by default.")
    ] = None,
    stages: Annotated[str, typer.Option(help="Names or numbers, with commas.")] = "01,02,03",
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Tensor-parallel ranks hold parts of the tokens.")
    ] = False,
    tokens: Annotated[
        str, typer.Option(help="T of every data-parallel rank, with commas.")
    ] = "7,2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Device = "cpu",
    timeout: Annotated[
        float, typer.Option(help="Seconds for each run.", callback=time_limit)
    ] = 120.0,
    python: Python = None,
    json_to: Json = None,
) -> None:
    """Build one of the checkpoint's MoE layers with vLLM's factory, on several ranks and without an engine."""
    from epmoe.vllm_plugin import compare as comparing
    from epmoe.vllm_plugin import engines, layers

    plan = layers.LayerPlan(
        model=str(model),
        layer=index,
        stages=comparing.resolve_stages(stages),
        dp=dp,
        tp=tp,
        sequence_parallel=sequence_parallel,
        tokens=whole_numbers("tokens", tokens),
        dtype=dtype,
        device=device,
        timeout=timeout,
    )
    with _leaving_on_sigterm():
        found = layers.compare(plan, engines.find_python(python), _say)
    deliver(found.as_dict(), json_to, layers.table(found))
    raise typer.Exit(0 if found.right else 1)


def _say(words: str) -> None:
    notes.print(words, style="dim", highlight=False, markup=False)


@contextlib.contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM leaves through `finally` blocks, which end the ranks and remove their folder."""
    if threading.current_thread() is not threading.main_thread():  # only there handlers can be set
        yield
        return

    def leave(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would break off the cleaning
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _stage_options(given: Sequence[str]) -> dict[str, str]:
    """By registered name: `03={"without": "merge"}`. Raises InputError for anything else."""
    from epmoe.vllm_plugin import compare as comparing

    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        stages = comparing.resolve_stages(name)
        if not equals or len(stages) != 1:
            raise InputError(
                f'--option {text!r}: give a stage, = and JSON: 03={{"without": "merge"}}'
            )
        _json(value, f"--option {name}=")
        options[stages[0]] = value
    return options


def _json(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{option} {text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{option} {text!r}: give a JSON object")
    return found
