"""One MoE layer of a checkpoint inside vLLM, on several ranks and real activations, against vLLM's own on one."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from epmoe.core import checkpoints
from epmoe.core.errors import InputError
from epmoe.vllm_plugin import engines
from epmoe.vllm_plugin.jobs import check_place
from epmoe.vllm_plugin.settings import NATIVE, NATIVE_EAGER

PROGRAM = "epmoe.vllm_plugin.layer_program"
TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 8
# relative to the largest value of the output; two orders of summation, one rounding of each product
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What to build: see the options of `epmoe vllm layer`. tokens: T of every data-parallel rank."""

    model: str
    layer: int | None
    stages: tuple[str, ...]
    dp: int
    tp: int
    sequence_parallel: bool
    tokens: tuple[int, ...]
    dtype: str
    device: str
    timeout: float

    def __post_init__(self):
        check_place(self.stages, self.device)
        if NATIVE_EAGER in self.stages:
            raise InputError(
                f"{NATIVE_EAGER}: a layer without an engine is never compiled, leave it out"
            )
        if not set(self.stages) - {NATIVE}:
            raise InputError(
                f"stages={','.join(self.stages)}: nothing to hold against {NATIVE}, name a stage"
            )
        if min(self.tokens, default=0) < 0:
            raise InputError(f"tokens={self.tokens}: give numbers of at least 0")
        if len(self.tokens) != self.dp:
            raise InputError(
                f"tokens={self.tokens}: give one number for each of dp={self.dp} ranks"
            )
        if self.dtype not in TOLERANCE:
            raise InputError(f"dtype={self.dtype!r}: choose one of {', '.join(TOLERANCE)}")
        if self.sequence_parallel and self.tp == 1:
            raise InputError(
                "sequence parallelism cuts tokens between tensor-parallel ranks: give tp > 1"
            )


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """One stage: the largest difference from native over all ranks, relative to native's largest value."""

    stage: str
    distance: float
    tolerance: float
    ran: bool
    report: dict[str, Any]

    @property
    def right(self) -> bool:
        return self.ran and self.distance <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    plan: LayerPlan
    layer: int
    results: list[LayerResult]

    @property
    def right(self) -> bool:
        return all(result.right for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        results = [{**asdict(r), "right": r.right} for r in self.results]
        return {
            "right": self.right,
            "layer": self.layer,
            "plan": asdict(self.plan),
            "results": results,
        }


def compare(plan: LayerPlan, python: str, say: Callable[[str], None] = print) -> LayerComparison:
    """Native on one rank with everybody's tokens, then every stage on dp * tp ranks. Raises what `engines` raises."""
    info = checkpoints.inspect(plan.model)
    index = info.moe_layers[0] if plan.layer is None else plan.layer
    total = sum(plan.tokens)
    x_TH = checkpoints.hidden_states(info.path, index, TEXT, max(1, total))[:total]
    if len(x_TH) < total:
        raise InputError(
            f"tokens={plan.tokens}: {total} in all, the text has {len(x_TH)}; give fewer"
        )
    say(f"{NATIVE} on 1 rank, {total} tokens")
    (expected_TH, _), *_ = _run(plan, index, NATIVE, [x_TH], 1, 1, python)
    results = []
    for stage in plan.stages:
        if stage == NATIVE:
            continue
        say(f"{stage} on {plan.dp * plan.tp} ranks, {' and '.join(map(str, plan.tokens))} tokens")
        answers = _run(plan, index, stage, list(x_TH.split(plan.tokens)), plan.dp, plan.tp, python)
        results.append(_judge(plan, stage, expected_TH, answers))
    return LayerComparison(plan=plan, layer=index, results=results)


def _run(
    plan: LayerPlan, layer: int, stage: str, parts: list[Tensor], dp: int, tp: int, python: str
) -> list[tuple[Tensor, dict[str, Any]]]:
    """(y, report) of every rank."""
    with tempfile.TemporaryDirectory(prefix="epmoe-layer-") as name:
        folder = Path(name)
        inputs = [folder / f"x-{rank}.pt" for rank in range(dp)]
        for file, part_TH in zip(inputs, parts, strict=True):
            torch.save(part_TH.contiguous().clone(), file)
        job = {
            "model": str(Path(plan.model).resolve()),
            "layer": layer,
            "dp": dp,
            "tp": tp,
            "sequence_parallel": plan.sequence_parallel and tp > 1,
            "dtype": plan.dtype,
            "device": plan.device,
            "max_tokens": max(32, *(len(part) for part in parts)),
            "inputs": [str(file) for file in inputs],
            "port": engines.free_port(),
        }
        (folder / "job.json").write_text(json.dumps(job))
        env = engines.environment(stage, plan.device, {})
        engines.run_ranks(
            PROGRAM, folder, python, env, dp * tp, plan.timeout, f"{stage}, one layer"
        )
        return [
            (
                torch.load(folder / f"y-{rank}.pt"),
                json.loads((folder / f"report-{rank}.json").read_text()),
            )
            for rank in range(dp * tp)
        ]


def _judge(
    plan: LayerPlan, stage: str, expected_TH: Tensor, answers: list[tuple[Tensor, dict[str, Any]]]
) -> LayerResult:
    scale, worst = float(expected_TH.abs().max()) if expected_TH.numel() else 1.0, 0.0
    for dp_rank, want_TH in enumerate(expected_TH.split(plan.tokens)):
        ours = [y for y, _ in answers[dp_rank * plan.tp : (dp_rank + 1) * plan.tp]]
        # with sequence parallelism each rank returns its part of the tokens, else all of them
        found = [torch.cat(ours)] if plan.sequence_parallel else ours
        for y_TH in found:
            if y_TH.shape != want_TH.shape or not bool(torch.isfinite(y_TH).all()):
                worst = float("inf")
            elif want_TH.numel():
                worst = max(worst, float((y_TH - want_TH).abs().max()))
    reports = [told for _, told in answers]
    layers = [one for told in reports for one in told["layers"]]
    return LayerResult(
        stage=stage,
        distance=worst / scale,
        tolerance=TOLERANCE[plan.dtype],
        ran=len(layers) == len(answers)
        and all(one["stage"] == stage and one["calls"] for one in layers),
        report=reports[0],
    )


def table(comparison: LayerComparison) -> Table:
    """One row per stage."""
    plan = comparison.plan
    title = f"{plan.model}, layer {comparison.layer}: dp={plan.dp}, tp={plan.tp}, {plan.dtype} on {plan.device}"
    shown = Table(
        "experts run on",
        "from native",
        "allowed",
        "ran",
        title=title,
        box=None,
        title_justify="left",
    )
    for one in comparison.results:
        distance = f"{one.distance:.1e}"
        shown.add_row(
            one.stage,
            distance if one.right else f"[red]{distance}[/red]",
            f"{one.tolerance:.0e}",
            "yes" if one.ran else "[red]no[/red]",
        )
    return shown
