"""What one engine run is told and what it answers, as JSON: the two sides may be different Python environments."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from epmoe.core.errors import InputError

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt of token ids, and how many tokens to generate."""

    ids: list[int]
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """One engine on dp * tp ranks; every rank reads the same job.

    Attributes:
        model: folder of the checkpoint.
        stage: a registered name, or "native".
        requests: by data-parallel rank.
        dtype: as vLLM takes it.
        dp, tp: ranks.
        eager: no compilation and no CUDA graphs.
        sabotage: an expert whose down projection changes its sign in every MoE layer, after the first generation, to
            see whether the text changes; None for none.
        repeats: timed repetitions of the whole generation, after one that is not timed.
        engine: more arguments for vLLM's LLM.
    """

    model: str
    stage: str
    requests: list[list[Request]]
    dtype: str = "float32"
    dp: int = 1
    tp: int = 1
    eager: bool = True
    sabotage: int | None = None
    repeats: int = 0
    engine: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: str | Path) -> "Job":
        data = json.loads(Path(path).read_text())
        data["requests"] = [[Request(**one) for one in some] for some in data["requests"]]
        return Job(**data)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one rank generated.

    Attributes:
        ids: of each request, in order.
        spoilt_ids: the same after the sabotage; empty without one.
        logprobs: of each request and generated token: {token id: log-probability} of the likeliest tokens.
        report: `report.of_this_process()`.
        seconds: of each timed repetition.
        start_seconds: until the engine was ready.
        machine: versions and device.
    """

    ids: list[list[int]]
    spoilt_ids: list[list[int]]
    logprobs: list[list[dict[str, float]]]
    report: dict[str, Any]
    seconds: list[float]
    start_seconds: float
    machine: dict[str, Any]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))

    @staticmethod
    def load(path: str | Path) -> "Answer":
        return Answer(**json.loads(Path(path).read_text()))


def check_place(stages: Sequence[str], device: str) -> None:
    """What every comparison refuses: a stage named twice, a device that is none. Raises InputError."""
    twice = sorted({stage for stage in stages if stages.count(stage) > 1})
    if twice:
        raise InputError(
            f"stages={','.join(stages)}: {', '.join(twice)} is there twice, name every stage once"
        )
    if device not in DEVICES:
        raise InputError(f"device={device!r}: choose one of {', '.join(DEVICES)}")


def check_expert(sabotage: int, experts: int) -> None:
    """Raise InputError unless the model's MoE layers have the expert that is to be spoilt."""
    if not 0 <= sabotage < experts:
        raise InputError(f"sabotage={sabotage}: the model has experts 0 to {experts - 1}")
