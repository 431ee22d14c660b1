"""The same prompts through vLLM with its own experts and with each stage's, every run in fresh processes."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from epmoe.core import registry
from epmoe.core.checkpoints import inspect
from epmoe.core.checkpoints.config import by_transformers
from epmoe.core.checkpoints.files import check_files
from epmoe.core.errors import InputError, RankFailedError, RunTimeoutError
from epmoe.vllm_plugin import engines
from epmoe.vllm_plugin.jobs import Job, Request, check_expert, check_place
from epmoe.vllm_plugin.judge import Outcome, StageResult, judge
from epmoe.vllm_plugin.settings import NATIVE, NATIVE_EAGER

PROMPTS = (
    "def main():\n    ",
    "import os\n",
    "class Queue:\n    def __init__(self",
    "for i in range(10):",
)
SPREADS = ("uneven", "even", "one")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to compare.

    Attributes:
        model: folder of the checkpoint.
        stages: registered names and "native", which runs first and is what the others are held against; "native-eager"
            is native once more without compiler and graphs: a yardstick of what rounding alone changes.
        prompts: texts.
        tokens: generated per prompt.
        dp, tp: ranks of the staged runs.
        spread: how prompts go to data-parallel ranks: "even" in turn, "uneven" (the last rank has one, the first ones
            share the others), "one" (the first has all, the others only follow).
        dtype, device: as vLLM takes them.
        compiled: as vLLM runs by default: torch.compile, and CUDA graphs on a GPU; stages that cannot be captured run
            eagerly all the same.
        rounds, repeats: every stage runs in `rounds` fresh engines in turn, each of which is timed `repeats` times.
        sabotage: an expert that is spoilt in one more generation of each run: the text has to change.
        options: of the stages, by registered name.
        engine: more arguments for vLLM's LLM.
        at_once: all engines of a round run at the same time: sooner done, but without times. They share the GPUs, so
            `engine` has to leave room ("gpu_memory_utilization").
    """

    model: str
    stages: tuple[str, ...]
    prompts: tuple[str, ...] = PROMPTS
    tokens: int = 16
    dp: int = 1
    tp: int = 1
    spread: str = "uneven"
    dtype: str = "float32"
    device: str = "cpu"
    compiled: bool = False
    rounds: int = 1
    repeats: int = 0
    sabotage: int | None = None
    timeout: float = 300.0
    options: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    at_once: bool = False

    def __post_init__(self):
        check_place(self.stages, self.device)
        if self.at_once and self.repeats:
            raise InputError(
                f"at_once with repeats={self.repeats}: engines that run together have no times of their own"
            )
        if self.at_once and self.device == "cpu":
            raise InputError("at_once on a cpu: vLLM's CPU groups find each other by one name")
        if self.spread not in SPREADS:
            raise InputError(f"spread={self.spread!r}: choose one of {', '.join(SPREADS)}")
        if not self.prompts:
            raise InputError("no prompt: give at least one")
        if NATIVE not in self.stages:
            raise InputError(
                f"stages={','.join(self.stages)}: {NATIVE} is missing, there is nothing to hold them against"
            )
        if NATIVE_EAGER in self.stages and not self.compiled:
            raise InputError(
                f"{NATIVE_EAGER} without compiled: {NATIVE} is eager as well then; give --compiled or leave it out"
            )
        unused = sorted(set(self.options) - set(self.stages))
        if unused:
            raise InputError(
                f"options of {', '.join(unused)}, which is not in stages={','.join(self.stages)}"
            )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything: the plan, the machine, one result per stage that ran, what the others said when they ended."""

    plan: Plan
    machine: dict[str, Any]
    results: list[StageResult]
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return not self.failed and all(result.right for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        results = [{**asdict(r), "right": r.right} for r in self.results]
        return {
            "right": self.right,
            "plan": asdict(self.plan),
            "machine": self.machine,
            "results": results,
            "failed": self.failed,
        }


def resolve_stages(names: str) -> tuple[str, ...]:
    """ "native,native-eager,01,02" as registered names. Raises InputError for an unknown one."""
    return tuple(
        name if name in (NATIVE, NATIVE_EAGER) else registry.resolve(name)
        for name in (part.strip() for part in names.split(","))
        if name
    )


def check_model(plan: Plan) -> None:
    """Raise InputError, before any engine starts, for a damaged checkpoint or an expert to spoil that it has not."""
    check_files(plan.model)
    if plan.sabotage is None:
        return
    try:
        experts = inspect(plan.model).shape.experts
    except InputError:  # of a family that only vLLM reads: its engine looks at the expert
        return
    check_expert(plan.sabotage, experts)


def tokenise(model: str, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of every prompt, by the checkpoint's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = by_transformers(AutoTokenizer.from_pretrained, Path(model), "tokenizer")
    return [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]


def spread(requests: Sequence[Request], ranks: int, how: str) -> list[list[int]]:
    """Indices of requests by data-parallel rank. Worked: 5 requests uneven on 2 ranks are 0 1 2 3 and 4."""
    count = len(requests)
    if how == "one" or ranks == 1:
        return [list(range(count)), *([] for _ in range(ranks - 1))]
    if how == "even" or count < ranks:
        return [list(range(rank, count, ranks)) for rank in range(ranks)]
    firsts = [list(range(rank, count - 1, ranks - 1)) for rank in range(ranks - 1)]
    return [*firsts, [count - 1]]


def job_for(plan: Plan, stage: str, requests: Sequence[Request]) -> tuple[Job, list[list[int]]]:
    """The engine run of one stage. On a CPU vLLM's own expert parallelism does not run: native has one rank there."""
    own = stage in (NATIVE, NATIVE_EAGER)
    alone = own and plan.device == "cpu"
    dp, tp = (1, 1) if alone else (plan.dp, plan.tp)
    order = spread(requests, dp, plan.spread)
    eager = not plan.compiled or stage == NATIVE_EAGER
    if not own and plan.device == "cuda":
        eager = eager or not registry.load(stage).capabilities.graph_capturable
    job = Job(
        model=str(Path(plan.model).resolve()),
        stage=NATIVE if own else stage,
        requests=[[requests[index] for index in some] for some in order],
        dtype=plan.dtype,
        dp=dp,
        tp=tp,
        eager=eager,
        sabotage=plan.sabotage,
        repeats=plan.repeats,
        engine=(engines.ON_CPU_ENGINE if plan.device == "cpu" else {}) | plan.engine,
    )
    return job, order


def compare(plan: Plan, python: str, say: Callable[[str], None] = print) -> Comparison:
    """Run every stage `plan.rounds` times, in turn. A stage that fails is out, with its last words; the others go on.

    Raises:
        InputError: as `check_model`.
        RankFailedError, RunTimeoutError: native vLLM failed, and there is nothing to hold the others against.
    """
    check_model(plan)
    ids = tokenise(plan.model, plan.prompts)
    requests = [Request(ids=one, tokens=plan.tokens) for one in ids]
    stages = sorted(plan.stages, key=lambda stage: stage != NATIVE)
    outcomes: dict[str, list[Outcome]] = {stage: [] for stage in stages}
    failed: dict[str, str] = {}
    stop = threading.Event()

    def attempt(stage: str, number: int) -> None:
        if stage in failed:
            return
        what, began = f"round {number + 1} of {plan.rounds}: {stage}", time.monotonic()
        say(what)
        try:
            outcomes[stage].append(run_once(plan, stage, requests, python, stop))
        except (RankFailedError, RunTimeoutError) as error:
            say(f"{what} failed after {time.monotonic() - began:.0f} s")
            failed[stage] = str(error)
            if stage == NATIVE:
                raise
        else:
            say(f"{what} took {time.monotonic() - began:.0f} s")

    for number in range(plan.rounds):
        order = stages if number % 2 == 0 else stages[::-1]
        work = [partial(attempt, stage, number) for stage in order]
        if plan.at_once:
            together(work, stop)
            continue
        for one in work:  # in this thread: an interrupt ends the engine that runs
            one()
    native = outcomes[NATIVE]
    results = [judge(stage, outcomes[stage], native) for stage in stages if stage not in failed]
    machine = native[0].answers[0].machine
    return Comparison(plan=plan, machine=machine, results=results, failed=failed)


def together(work: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Every piece in a thread of its own; after an error or an interrupt `stop` is set, so that the others end."""
    with ThreadPoolExecutor(len(work)) as threads:
        try:
            for done in as_completed([threads.submit(one) for one in work]):
                done.result()
        except BaseException:
            stop.set()
            raise


def run_once(
    plan: Plan,
    stage: str,
    requests: Sequence[Request],
    python: str,
    stop: threading.Event | None = None,
) -> Outcome:
    """One fresh engine on `stage`. Raises what `engines.run` raises."""
    job, order = job_for(plan, stage, requests)
    variables = {"EPMOE_STAGE_OPTIONS": plan.options.get(stage, "")}
    if plan.device == "cuda":
        variables["EPMOE_COUNT"] = "1"
    answers = engines.run(job, python, plan.device, plan.timeout, variables, stop)
    return Outcome(job, answers, order)


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt per line; `\\n` in a line is a line break. Raises InputError for a file without one, or none."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"prompts={path}: {error}; give a text file, one prompt per line"
        ) from error
    lines = [line.replace("\\n", "\n") for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{path} holds no prompt: write one per line")
    return tuple(lines)


def with_limits(plan: Plan, model_length: int) -> Plan:
    """The plan with engine limits that a small run needs; what the plan says itself stays."""
    limits = {"max_model_len": model_length, "max_num_batched_tokens": model_length}
    return replace(plan, engine=limits | plan.engine)
