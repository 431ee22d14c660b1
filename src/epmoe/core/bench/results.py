"""What a measurement leaves behind: one JSON that says where it comes from and can be checked against itself.

Every number that is shown follows from `samples_us`, and `validate` computes it again: a file whose medians do not fit
its samples, or that holds a time whose gates failed, is refused.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from epmoe.core.bench.floors import floor_us, operations_per_assignment, seen
from epmoe.core.bench.method import Estimate, over_floor, ratio
from epmoe.core.errors import InputError

SCHEMA = 2  # 1 had floors of reading alone
_MACHINE = ("git_sha", "git_dirty", "device", "driver", "torch", "triton", "nccl", "vllm")
_SETTING = (
    "shape",
    "ep",
    "loopback",
    "transport",
    "dtype",
    "seed",
    "routing",
    "layers",
    "router",
    "clock",
    "floor_bytes_per_second",
    "floor_operations_per_second",
)
_SIZES = ("hidden", "intermediate", "experts", "topk")
_CLOSE = 1e-6
_NUMBERS = re.compile(r"\[[\s\d.,eE+-]+\]")


def _on_one_line(numbers: re.Match[str]) -> str:
    return re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]")


@dataclass(frozen=True, kw_only=True)
class DrawRecord:
    """One routing: its seed, active experts and assignments of every rank, and the floor: see `floors.floor_us`."""

    seed: int
    active: list[int]
    assignments: list[int]
    floor_us: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One subject at one T.

    Attributes:
        mode: "graph" or "eager".
        replays: chains per block.
        samples_us: microseconds per layer, one per block, slowest rank; block b worked on draw b % draws.
        median_us: the mean over draws of each draw's median.
        over_floor: time / floor at the nominal bandwidth, draw by draw, their mean: median, low, high.
        over_ceiling: the same at the bandwidth that this run streamed.
        tflops: of the expert products of one rank, 1e12 operations/s.
        gates: the worst oracle error and its limit.
        error: why there is no time; then everything else is empty.
        describe: what the subject says of itself.
        profile: where its time goes, see `profile.Profile`; empty where nobody looked.
    """

    mode: str
    replays: int = 0
    samples_us: list[float] = field(default_factory=list)
    median_us: float | None = None
    over_floor: list[float] | None = None
    over_ceiling: list[float] | None = None
    tflops: float | None = None
    gates: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    describe: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Time of `of` over time of `to`, per-block median with its 95% interval; see `method.Estimate.claim`."""

    of: str
    to: str
    median: float
    low: float
    high: float
    claim: str


@dataclass(frozen=True, kw_only=True)
class Point:
    """All subjects at one T; `refused` are those that cannot run here, with the reason."""

    tokens: int
    draws: list[DrawRecord]
    subjects: dict[str, Measured]
    ratios: list[Ratio]
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Result:
    """One run of `epmoe bench`.

    Attributes:
        created: UTC, ISO 8601.
        command: as it was typed.
        machine, setting, ceiling: see `provenance.machine`, `run.setting_record`, `streaming.ceiling`.
        clocks: {"before": ..., "after": ...}.
        points: by T.
        tuning: what was tuned, how, and what came out.
        skipped: T sizes that were asked for and not measured, with the reason.
    """

    created: str
    command: str
    machine: dict[str, Any]
    setting: dict[str, Any]
    ceiling: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    tuning: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    kind: str = "layer"
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Write JSON, whole or not at all: a reader never sees half a file."""
        if path.exists() and not path.is_file():  # a device such as /dev/stdout is not replaced
            path.write_text(self.text())
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(path.name + ".part")
        half.write_text(self.text())
        half.replace(path)

    def text(self) -> str:
        """As JSON, lists of numbers on one line."""
        return _NUMBERS.sub(_on_one_line, json.dumps(asdict(self), indent=1)) + "\n"


def load(path: Path) -> Result:
    """Read and validate. Raises InputError that names the file and what is wrong."""
    try:
        data = json.loads(path.read_text())
        points = sorted(map(_point, data.pop("points")), key=lambda point: point.tokens)
        result = Result(**data, points=points)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no benchmark result: {error!r}") from error
    problems = validate(result)
    if problems:
        raise InputError(f"{path} is not valid: {'; '.join(problems[:5])}")
    return result


def _point(data: dict[str, Any]) -> Point:
    return Point(
        tokens=data["tokens"],
        draws=[DrawRecord(**d) for d in data["draws"]],
        subjects={name: Measured(**m) for name, m in data["subjects"].items()},
        ratios=[Ratio(**r) for r in data["ratios"]],
        refused=data["refused"],
    )


def validate(result: Result) -> list[str]:
    """Everything that is wrong with a result, in words; an empty list when nothing is."""
    if result.schema != SCHEMA:
        return [f"schema is {result.schema}, this program reads {SCHEMA}"]
    problems = [f"machine has no {k}" for k in _MACHINE if k not in result.machine]
    problems += [f"setting has no {k}" for k in _SETTING if k not in result.setting]
    problems += [f"{name} is empty" for name in ("created", "command") if not getattr(result, name)]
    problems += [
        f"shape has no {k}" for k in _SIZES if k not in (result.setting.get("shape") or {})
    ]
    if not result.points:
        problems.append("there is no point")
    read = result.ceiling.get("read_bytes_per_second", 0)
    if not read > 0:
        problems.append("the streaming ceiling was not measured")
    if problems:
        return problems
    for point in result.points:
        problems += [f"T={point.tokens}: {p}" for p in _problems_of(point, result)]
    return problems


def _problems_of(point: Point, result: Result) -> list[str]:
    problems = []
    if not point.draws or min(d.floor_us for d in point.draws) <= 0:
        return ["a draw has no floor above 0"]
    floors = [floor_us(result.setting, d.active, d.assignments) for d in point.draws]
    if not _equal([d.floor_us for d in point.draws], floors):
        return ["a draw's floor does not follow from its active experts and assignments"]
    for name, one in point.subjects.items():
        problems += [f"{name}: {p}" for p in _problems_of_subject(one, point, result)]
    timed = timed_subjects(point)
    wanted = set(itertools.combinations(timed, 2))
    held = {(r.of, r.to) for r in point.ratios}
    if wanted != held:
        problems.append(f"ratios are of {sorted(held)}, the times ask for {sorted(wanted)}")
        return problems
    for r in point.ratios:
        again = ratio(timed[r.of], timed[r.to])
        if not _equal([r.median, r.low, r.high], [again.median, again.low, again.high]):
            problems.append(f"ratio {r.of} / {r.to} does not follow from the samples")
        if r.claim != again.claim:
            problems.append(f"{r.of} / {r.to} is {again.claim}, the file claims {r.claim}")
    return problems


def _problems_of_subject(one: Measured, point: Point, result: Result) -> list[str]:
    if one.error is not None:
        return ["has a time although it failed"] if one.samples_us or one.median_us else []
    if one.mode not in ("graph", "eager"):
        return [f"mode is {one.mode!r}"]
    error, limit = one.gates.get("oracle_error"), one.gates.get("oracle_limit")
    if error is None or limit is None or not error <= limit:
        return [f"its gates say {one.gates}: no time without a passed gate"]
    if not one.samples_us or min(one.samples_us) <= 0:
        return ["has no samples"]
    again = summarise(one.samples_us, point.draws, result)
    problems = [
        f"{name} does not follow from the samples"
        for name in ("over_floor", "over_ceiling")
        if not _equal(getattr(one, name) or [], again[name])
    ]
    if not _equal([one.median_us or 0], [again["median_us"]]):
        problems.append("median_us does not follow from the samples")
    return problems


def _equal(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(
        abs(x - y) <= _CLOSE * abs(y) for x, y in zip(a, b, strict=True)
    )


def timed_subjects(point: Point) -> dict[str, list[float]]:
    """Samples of the subjects that have a time, in their order."""
    return {n: m.samples_us for n, m in point.subjects.items() if m.error is None}


def summarise(
    samples_us: Sequence[float], draws: Sequence[DrawRecord], result: Result
) -> dict[str, Any]:
    """What follows from one subject's samples: median_us, over_floor, over_ceiling, tflops."""
    floors = [d.floor_us for d in draws]
    median_us = over_floor(samples_us, [1.0] * len(draws)).median
    setting, read = result.setting, result.ceiling["read_bytes_per_second"]
    ceilings = [floor_us(setting, d.active, d.assignments, read) for d in draws]
    most = [max(seen(d.assignments, setting)) for d in draws]
    operations = operations_per_assignment(setting) * sum(most) / len(most)
    return {
        "median_us": median_us,
        "over_floor": over_floor(samples_us, floors).values(),
        "over_ceiling": over_floor(samples_us, ceilings).values(),
        "tflops": operations / median_us / 1e6,
    }


def ratios_of(timed: Mapping[str, Sequence[float]]) -> list[Ratio]:
    """Every pair of subjects, the earlier one over the later one."""
    return [
        _ratio(of, to, ratio(timed[of], timed[to])) for of, to in itertools.combinations(timed, 2)
    ]


def compared(point: Point, of: str, to: str) -> Ratio | None:
    """Time of `of` over time of `to`, whichever way round it was stored; None where one has no time."""
    for held in point.ratios:
        if (held.of, held.to) == (of, to):
            return held
        if (held.of, held.to) == (to, of):
            # medians and quantiles turn around with a monotone map, up to the rounding of an even count
            return _ratio(of, to, Estimate(1 / held.median, 1 / held.high, 1 / held.low))
    return None


def _ratio(of: str, to: str, found: Estimate) -> Ratio:
    return Ratio(
        of=of, to=to, median=found.median, low=found.low, high=found.high, claim=found.claim
    )
