"""A stage's runs held against native vLLM's: ids, log-probabilities, proof that its code ran, speed."""

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

    def in_order(self, name: str) -> list[Any]:
        """An attribute of the answers, one entry per prompt; tensor-parallel ranks repeat each other's."""
        found: dict[int, Any] = {}
        for rank, answer in enumerate(self.answers):
            found |= dict(zip(self.order[rank // self.job.tp], getattr(answer, name), strict=False))
        return [found[index] for index in sorted(found)]

    def rate(self) -> list[float]:
        """Generated tokens per second of each timed repetition."""
        tokens = sum(request.tokens for some in self.job.requests for request in some)
        slowest = [max(times) for times in zip(*(a.seconds for a in self.answers), strict=True)]
        return [tokens / seconds for seconds in slowest]


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
        equal: whether every generated id is the same; `difference` is the first one that is not.
        max_logprob_distance, mean_logprob_distance: over likeliest tokens that both list, up to the first difference.
        layers, calls_per_rank, runs_per_rank: MoE layers that say they ran on this stage; calls of the first of them.
        ran: every MoE layer of every rank ran on this stage and on no other.
        sabotage_seen: whether a spoilt expert changed the text; None where none was spoilt.
        tokens_per_second: of every timed repetition, generated tokens of all ranks over the slowest rank's seconds.
        against_native: (median, low, high) of tokens per second over native's, round by round; None without times.
    """

    stage: str
    ranks: int
    eager: bool
    equal: bool
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
        return equal and self.ran and self.sabotage_seen is not False


def judge(stage: str, runs: Sequence[Outcome], native: Sequence[Outcome]) -> StageResult:
    """Hold a stage's runs against native's first one."""
    expected, reference = native[0].in_order("ids"), native[0].in_order("logprobs")
    worst = max(runs, key=lambda run: run.in_order("ids") != expected)
    found, logprobs = worst.in_order("ids"), worst.in_order("logprobs")
    difference = first_difference(expected, found, reference)
    distances = logprob_distances(expected, found, reference, logprobs)
    layers = [answer.report["layers"] for run in runs for answer in run.answers]
    spoilt = worst.in_order("spoilt_ids")
    rates = [run.rate() for run in runs]
    return StageResult(
        stage=stage,
        ranks=len(worst.answers),
        eager=worst.job.eager,
        equal=difference is None,
        difference=difference,
        max_logprob_distance=max(distances, default=0.0),
        mean_logprob_distance=sum(distances) / max(1, len(distances)),
        layers=len(layers[0]),
        calls_per_rank=[some[0]["calls"] if some else 0 for some in layers],
        runs_per_rank=[some[0].get("runs") if some else None for some in layers],
        ran=ran_on(stage, layers),
        sabotage_seen=None if worst.job.sabotage is None else spoilt != found,
        tokens_per_second=[rate for some in rates for rate in some],
        against_native=_against(rates, [run.rate() for run in native]),
        ids=found,
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
            distances += [abs(mine[token] - other[token]) for token in mine.keys() & other.keys()]
            if a != b:
                break
    return distances


def _against(
    rates: Sequence[Sequence[float]], native: Sequence[Sequence[float]]
) -> tuple[float, float, float] | None:
    mine, theirs = ([r for some in all_ for r in some] for all_ in (rates, native))
    if not mine or len(mine) != len(theirs):
        return None
    found = ratio(mine, theirs)
    return found.median, found.low, found.high
