"""Leads the tour: gets the real activations, starts the ranks, runs stage after stage, and says what it does."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from epmoe.core.checkpoints import CheckpointInfo, hidden_states, inspect
from epmoe.core.errors import UnsupportedError
from epmoe.core.launch import open_ranks
from epmoe.core.placement import contiguous
from epmoe.core.room import counted
from epmoe.core.tour import StageRow, TourReport, measure
from epmoe.core.values import dtype_name, named_dtype


def guide(
    console: Console,
    stages: Sequence[str],
    ranks: int,
    device: str,
    model: Path,
    text: str,
    tokens: int,
    dtype: str,
    timeout: float,
) -> TourReport:
    """Run the tour.

    Args:
        console: for progress.
        stages: registered names.
        ranks, device, timeout: see `open_ranks`; seconds for each stage.
        model: the checkpoint; its middle MoE layer is toured.
        text, tokens: what the model reads, and how many tokens of it at most.
        dtype: a torch dtype's name, or "auto".
    """
    info = inspect(model)
    layer = info.moe_layers[len(info.moe_layers) // 2]
    steps = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )
    with open_ranks(ranks, device) as pool, steps:  # the ranks start while the model reads
        step = steps.add_task(f"{model.name} reads the text")
        x_TH = hidden_states(model, layer, text, tokens)
        steps.update(step, description=f"starting {counted(ranks, 'rank')}")
        used = named_dtype(dtype, pool.choice.device_type)
        rows: list[StageRow] = []
        visits: list[list[int]] = []
        refused: dict[str, str] = {}
        for stage in stages:
            steps.update(step, description=f"running {stage}")
            try:
                results = pool.run(measure, stage, model, layer, x_TH, used, timeout=timeout)
            except UnsupportedError as error:
                refused[stage] = str(error)
                continue
            rows += [row for row, _ in results]
            visits = [counts for _, counts in results]
        where = pool.describe()
        on = pool.choice.device_type
    console.print(where, style="dim", highlight=False)
    return TourReport(
        where=where,
        device=on,
        dtype=dtype_name(used),
        layer=_sentence(info, layer, len(x_TH), used),
        rows=rows,
        visits=visits or [[0] * info.shape.experts for _ in range(ranks)],
        owners=list(contiguous(info.shape.experts, ranks).owners),
        refused=refused,
    )


def _sentence(info: CheckpointInfo, layer: int, tokens: int, dtype: torch.dtype) -> str:
    sizes = info.shape
    return (
        f"Layer {layer} of {info.path.name}: {sizes.experts} experts, {sizes.topk} per token, H={sizes.hidden}, "
        f"I={sizes.intermediate}, {str(dtype).removeprefix('torch.')}\n{counted(tokens, 'token')} of real text"
    )
