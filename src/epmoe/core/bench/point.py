"""One T: build the subjects, hold each against the gates, time those that passed, in one interleaved run."""

import math
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from epmoe.core.bench import vllm_subjects
from epmoe.core.bench.chains import Chain
from epmoe.core.bench.floors import floor_us, seen
from epmoe.core.bench.gates import Expected, check_chain, check_router, expectations
from epmoe.core.bench.method import Clock, Contestant, measure, slowest
from epmoe.core.bench.profile import profile_chain
from epmoe.core.bench.results import (
    DrawRecord,
    Measured,
    Point,
    Result,
    ratios_of,
    summarise,
    timed_subjects,
)
from epmoe.core.bench.subjects import Setting, Subject, make_subject
from epmoe.core.bench.workload import TUNING_SEED
from epmoe.core.errors import InputError, UnsupportedError

_EAGER_SHARE = 10  # an eager chain is not replayed but called: this many times less often
_TUNING_RUNS = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to measure one point; fields as in `run.Config`. `tuning` makes the setting with tuning draws."""

    names: tuple[str, ...]
    blocks: int
    replays: int
    rows: int
    weight_seed: int
    sweep: int
    configs: dict[int, dict[str, int]] | None
    tuning: Callable[[], Setting]
    profile: bool = False
    # for tests: what makes a subject of a name
    make: Callable[[str, Setting, dict | None], Subject] = make_subject


@dataclass
class _Runner:
    """A subject that passed its gates, with one chain per draw."""

    subject: Subject
    chains: list[Chain]
    gates: dict[str, float] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        return "graph" if self.chains and self.chains[0].graphed else "eager"

    def close(self) -> None:
        for chain in self.chains:
            chain.close()
        self.subject.close()


def tuning_seed(seed: int) -> int:
    """Of tuning draws; far from every seed that is reported."""
    return TUNING_SEED + seed * 1000


def measure_point(
    clock: Clock, setting: Setting, plan: Plan, result: Result
) -> tuple[Point, dict[str, object]]:
    """The point, and what was tuned for it. Collective."""
    draws = draw_records(setting, result)
    check_router(setting)
    expected = expectations(setting, plan.weight_seed, plan.rows)
    configs, tuned = _tuned_configs(clock, setting, plan)
    runners: dict[str, _Runner] = {}
    subjects: dict[str, Measured] = {}
    refused: dict[str, str] = {}
    try:
        for name in plan.names:
            outcome = _prepare(name, setting, plan, configs, expected)
            if isinstance(outcome, _Runner):
                runners[name] = outcome
                subjects[name] = Measured(mode=outcome.mode)  # keeps the order
            elif isinstance(outcome, UnsupportedError):
                refused[name] = str(outcome)
            else:
                subjects[name] = Measured(mode="none", error=_words(outcome))
        samples = _time(clock, setting, plan, runners)
        for name, times in samples.items():
            profile = profile_chain(runners[name].chains[0], setting) if plan.profile else {}
            subjects[name] = _measured(runners[name], times, profile, plan, draws, result)
    finally:
        for runner in runners.values():
            runner.close()
    point = Point(tokens=setting.tokens, draws=draws, subjects=subjects, ratios=[], refused=refused)
    point.ratios.extend(ratios_of(timed_subjects(point)))
    return point, tuned


def draw_records(setting: Setting, result: Result) -> list[DrawRecord]:
    """What every draw asks, with the floor of the rank that is played, or of the slowest."""
    records = []
    for one in setting.draws:
        active = [int(n) for n in one.load.active]
        assignments = [int(n) for n in one.load.assignments]
        if max(seen(active, result.setting)) == 0:
            raise InputError(
                f"draw {one.seed} names no expert of rank {setting.rank}, so it has no floor: play another rank"
            )
        records.append(
            DrawRecord(
                seed=one.seed,
                active=active,
                assignments=assignments,
                floor_us=floor_us(result.setting, active, assignments),
            )
        )
    return records


def _prepare(
    name: str,
    setting: Setting,
    plan: Plan,
    configs: dict | None,
    expected: list[list[Expected]],
) -> "_Runner | Exception":
    """A subject that passed on all ranks, or the first rank's reason why not: then nobody times it."""
    runner, problem = None, None
    try:
        subject = plan.make(name, setting, configs)
        runner = _Runner(subject, [])
        pool = torch.cuda.graph_pool_handle() if setting.device.type == "cuda" else None
        for draw in range(len(setting.draws)):
            runner.chains.append(Chain(subject, draw, pool))
            found = check_chain(runner.chains[-1], expected[draw], setting.dtype)
            if found["oracle_error"] >= runner.gates.get("oracle_error", -1.0):
                runner.gates = found
    except Exception as error:  # whatever it is, it is this subject's result, not the run's end
        problem = error
    problems = setting.group.all_gather_objects(
        None if problem is None else (isinstance(problem, UnsupportedError), _words(problem))
    )
    first = next((p for p in problems if p is not None), None)
    if first is None and runner is not None:
        return runner
    if runner is not None:
        with suppress(Exception):  # it has failed already, and that is what is reported
            runner.close()
    if problem is not None:
        return problem
    assert first is not None
    return (UnsupportedError if first[0] else RuntimeError)(first[1])


def _words(error: Exception) -> str:
    """One line: what, and for a surprise also where."""
    if isinstance(error, (InputError, RuntimeError)) and type(error) is not RuntimeError:
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}".replace("\n", " ")[:2000]


def _time(
    clock: Clock, setting: Setting, plan: Plan, runners: dict[str, _Runner]
) -> dict[str, list[float]]:
    contestants = {
        name: Contestant(
            run=lambda draw, chains=runner.chains: chains[draw].run(),
            layers=len(setting.weights),
            replays=replays_of(runner.mode, setting, plan.replays),
        )
        for name, runner in runners.items()
    }
    if not contestants:
        return {}
    measure(clock, contestants, len(setting.draws), 1)  # clocks rise before anything counts
    mine = measure(clock, contestants, len(setting.draws), plan.blocks)
    by_rank = setting.group.all_gather_objects(mine)
    return {name: slowest([samples[name] for samples in by_rank]) for name in contestants}


def replays_of(mode: str, setting: Setting, replays: int) -> int:
    """Chains per block, an even number: graphs as asked for; eager calls on a GPU a tenth."""
    if mode == "eager" and setting.device.type == "cuda":
        replays = replays // _EAGER_SHARE
    return 2 * max(1, replays // 2)


def _measured(
    runner: _Runner,
    samples: list[float],
    profile: dict[str, Any],
    plan: Plan,
    draws: list[DrawRecord],
    result: Result,
) -> Measured:
    return Measured(
        mode=runner.mode,
        replays=replays_of(runner.mode, runner.subject.setting, plan.replays),
        samples_us=samples,
        gates=runner.gates,
        describe=runner.subject.describe(),
        profile=profile,
        **summarise(samples, draws, result),
    )


def _tuned_configs(
    clock: Clock, setting: Setting, plan: Plan
) -> tuple[dict | None, dict[str, object]]:
    """Configurations for the tuned vLLM subjects: from the plan, or swept here on tuning draws."""
    wanted = [name for name in plan.names if name in vllm_subjects.TUNED]
    if plan.configs is not None or not wanted or not plan.sweep:
        return plan.configs, {}
    tuning = plan.tuning()
    try:
        best, scores = vllm_subjects.sweep(
            tuning, plan.sweep, lambda subject: _microseconds(clock, subject)
        )
    except UnsupportedError:
        return None, {}  # the subject itself will say why
    rows = setting.ranks * setting.tokens
    return {rows: best}, {
        "subject": wanted[0],
        "rows": rows,
        "draw_seeds": [one.seed for one in tuning.draws],
        "best": best,
        "microseconds": {k: v if math.isfinite(v) else "did not run" for k, v in scores.items()},
    }


def _microseconds(clock: Clock, subject: Subject) -> float:
    """Of one layer, over a few replays of a graph."""
    chain = Chain(subject, 0)
    try:
        chain.run()
        clock.start()
        for _ in range(_TUNING_RUNS):
            chain.run()
        clock.stop()
        return clock.milliseconds() * 1e3 / (_TUNING_RUNS * len(subject.setting.weights))
    finally:
        chain.close()


def headline(point: Point) -> str:
    """One line for the terminal."""
    words = [
        f"{name} {one.median_us:.1f} us ({(one.over_floor or [0])[0]:.2f})"
        if one.median_us is not None
        else f"{name} FAILED: {one.error}"
        for name, one in point.subjects.items()
    ]
    return ", ".join([*words, *(f"{name} refused" for name in point.refused)])
