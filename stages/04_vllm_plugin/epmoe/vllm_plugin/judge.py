"""A stage's runs held against native vLLM's: ids, log-probabilities, proof that its code ran, speed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epmoe.core.bench.method import ratio
from epmoe.vllm_plugin.jobs import Answer, Job
from epmoe.vllm_plugin.settings import NATIVE, NATIVE_EAGER


@dataclass(frozen=True)
class Outcome:
    """Answers of all ranks of one run, and its requests put back in the order of the prompts."""

    job: Job
    answers: list[Answer]
    order: list[list[int]]

    def in_order(self, name: str, place: int = 0) -> list[Any]:
        """An attribute of the answers, one entry per prompt, as tensor-parallel rank `place` has it."""
        found: dict[int, Any] = {}
        for some, answer in zip(self.order, self.answers[place :: self.job.tp], strict=True):
            found |= dict(zip(some, getattr(answer, name), strict=False))
        return [found[index] for index in sorted(found)]

    def copies(self) -> "list[Copy]":
        """What was generated, once per tensor-parallel rank: they should repeat each other."""
        names = ("ids", "logprobs", "spoilt_ids")
        return [
            Copy(*(self.in_order(name, place) for name in names)) for place in range(self.job.tp)
        ]

    def rate(self) -> list[float]:
        """Generated tokens per second of each timed repetition."""
        tokens = sum(request.tokens for some in self.job.requests for request in some)
        slowest = [max(times) for times in zip(*(a.seconds for a in self.answers), strict=True)]
        return [tokens / seconds for seconds in slowest]


@dataclass(frozen=True)
class Copy:
    """The `Answer`s of one tensor-parallel place, one entry per prompt."""

    ids: list[list[int]]
    logprobs: list[list[dict[str, float]]]
    spoilt_ids: list[list[int]]

    def notices(self) -> bool:
        """Whether the spoilt generation is whole and another one: one that is missing shows nothing."""
        lengths = [[len(row) for row in rows] for rows in (self.ids, self.spoilt_ids)]
        return lengths[0] == lengths[1] and self.ids != self.spoilt_ids


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token that differs: generated token `position` of prompt `prompt`.

    gap: how much likelier, in log-probability, the reference finds its own token; None where it does not list ours.
    """

    prompt: int
    position: int
    expected: int
    found: int
    gap: float | None


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """One stage against native vLLM.

    Attributes:
        ranks, eager: how it ran.
        equal: whether every generated id of every run is the same; `difference` is the first one that is not.
        agreed: whether tensor-parallel ranks generated the same ids in every run.
        max_logprob_distance, mean_logprob_distance: over likeliest tokens that both list, up to the first difference,
            of all runs; NaN where one of them is NaN.
        layers, calls_per_rank, runs_per_rank: MoE layers that say they ran on this stage; calls of the first of them.
        ran: every MoE layer of every rank ran on this stage and on no other.
        sabotage_seen: whether a spoilt expert changed the text in every run; None where none was spoilt.
        tokens_per_second: of every timed repetition, generated tokens of all ranks over the slowest rank's seconds.
        against_native: (median, low, high) of tokens per second over native's, round by round; None without times.
    """

    stage: str
    ranks: int
    eager: bool
    equal: bool
    agreed: bool
    difference: Difference | None
    max_logprob_distance: float
    mean_logprob_distance: float
    layers: int
    calls_per_rank: list[int]
    runs_per_rank: list[int | None]
    ran: bool
    sabotage_seen: bool | None
    tokens_per_second: list[float]
    against_native: tuple[float, float, float] | None
    ids: list[list[int]]

    @property
    def right(self) -> bool:
        """Where the yardstick's text differs, nothing is wrong: that is what it is there to show."""
        equal = self.equal or self.stage == NATIVE_EAGER
        finite = math.isfinite(self.max_logprob_distance)
        return equal and self.agreed and finite and self.ran and self.sabotage_seen is not False


def judge(stage: str, runs: Sequence[Outcome], native: Sequence[Outcome]) -> StageResult:
    """Hold a stage's runs against native's first one."""
    expected, reference = native[0].in_order("ids"), native[0].in_order("logprobs")
    by_run = [run.copies() for run in runs]
    copies = [copy for some in by_run for copy in some]
    worst = max(copies, key=lambda copy: copy.ids != expected)
    difference = first_difference(expected, worst.ids, reference)
    distances = [
        distance
        for copy in copies
        for distance in logprob_distances(expected, copy.ids, reference, copy.logprobs)
    ]
    layers = [answer.report["layers"] for run in runs for answer in run.answers]
    rates = [run.rate() for run in runs]
    return StageResult(
        stage=stage,
        ranks=len(runs[0].answers),
        eager=runs[0].job.eager,
        equal=difference is None,
        agreed=all(copy.ids == some[0].ids for some in by_run for copy in some),
        difference=difference,
        max_logprob_distance=largest(distances),
        mean_logprob_distance=sum(distances) / max(1, len(distances)),
        layers=len(layers[0]),
        calls_per_rank=[some[0]["calls"] if some else 0 for some in layers],
        runs_per_rank=[some[0].get("runs") if some else None for some in layers],
        ran=ran_on(stage, layers),
        sabotage_seen=None
        if runs[0].job.sabotage is None
        else all(copy.notices() for copy in copies),
        tokens_per_second=[rate for some in rates for rate in some],
        against_native=_against(rates, [run.rate() for run in native]),
        ids=worst.ids,
    )


def ran_on(stage: str, layers_by_rank: Sequence[Sequence[dict[str, Any]]]) -> bool:
    """Whether every layer of every rank was called on this stage; for native, whether no stage was there at all."""
    if stage in (NATIVE, NATIVE_EAGER):
        return not any(layers_by_rank)
    return all(
        layers and all(one["stage"] == stage and one["calls"] > 0 for one in layers)
        for layers in layers_by_rank
    )


def first_difference(
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    reference: Sequence[Sequence[dict[str, float]]],
) -> Difference | None:
    """The first generated token that differs, prompt by prompt; None where all are equal."""
    for prompt, (want, have) in enumerate(zip(expected, found, strict=True)):
        if list(want) == list(have):
            continue
        position = next(
            (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b),
            min(len(want), len(have)),
        )
        a, b = (row[position] if position < len(row) else -1 for row in (want, have))
        listed = reference[prompt][position] if position < len(reference[prompt]) else {}
        gap = listed[str(a)] - listed[str(b)] if {str(a), str(b)} <= set(listed) else None
        return Difference(prompt=prompt, position=position, expected=a, found=b, gap=gap)
    return None


def logprob_distances(
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    reference: Sequence[Sequence[dict[str, float]]],
    logprobs: Sequence[Sequence[dict[str, float]]],
) -> list[float]:
    """|difference| of every log-probability that both list, up to and with the first token that differs."""
    distances = []
    for want, have, ours, theirs in zip(expected, found, logprobs, reference, strict=True):
        for a, b, mine, other in zip(want, have, ours, theirs, strict=False):
            distances += [_apart(mine[token], other[token]) for token in mine.keys() & other.keys()]
            if a != b:
                break
    return distances


def largest(distances: Sequence[float]) -> float:
    """Their maximum, NaN where one is NaN: `max` would keep or drop it depending on where it stands."""
    if any(math.isnan(distance) for distance in distances):
        return math.nan
    return max(distances, default=0.0)


def _apart(a: float, b: float) -> float:
    """Worked: two tokens that both runs rule out, -inf and -inf, are 0 apart."""
    return 0.0 if a == b else abs(a - b)


def _against(
    rates: Sequence[Sequence[float]], native: Sequence[Sequence[float]]
) -> tuple[float, float, float] | None:
    mine, theirs = ([r for some in all_ for r in some] for all_ in (rates, native))
    if not mine or len(mine) != len(theirs):
        return None
    found = ratio(mine, theirs)
    return found.median, found.low, found.high
