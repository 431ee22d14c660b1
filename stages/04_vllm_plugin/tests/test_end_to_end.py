"""A real model's text with its experts on a stage: the same ids as from vLLM alone, others once an expert is spoilt.

Every engine is a fresh process or two. vLLM's own expert parallelism does not run on its CPU backend, so what the
stages are held against is vLLM on one rank. The fused stage runs its real kernels through Triton's interpreter, which
is slow: it gets short prompts and few tokens.
"""

import pytest

from epmoe.core.errors import RankFailedError
from epmoe.vllm_plugin import engines
from epmoe.vllm_plugin.compare import Outcome, Plan, job_for, tokenise
from epmoe.vllm_plugin.jobs import Request
from epmoe.vllm_plugin.judge import judge
from epmoe.vllm_plugin.settings import NATIVE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PROMPTS = ("import os\n", "def", "class A:", "for i in ")
HOT = 0  # an expert that these prompts use in every MoE layer
LIMITS = {"max_model_len": 64, "max_num_batched_tokens": 64}
ONE, TWO, THREE = "01_variable_a2a", "02_fixed_capacity", "03_fused_triton"


class Runner:
    """Runs one stage's engine on the same requests."""

    def __init__(self, python: str, model: str):
        self.python, self.model = python, model
        self.ids = tokenise(model, PROMPTS)
        self.lengths = (6, 4, 6, 2)  # ranks end at different times; vLLM keeps the idle one in step

    def requests(self) -> list[Request]:
        return [Request(ids=i, tokens=t) for i, t in zip(self.ids, self.lengths, strict=True)]

    def __call__(self, stage: str, variables: dict[str, str] | None = None, **plan) -> Outcome:
        asked = Plan(model=self.model, stages=(NATIVE, stage), engine=LIMITS, **plan)
        job, order = job_for(asked, stage, self.requests())
        answers = engines.run(job, self.python, "cpu", 360, variables)
        return Outcome(job, answers, order)


@pytest.fixture(scope="module")
def run(vllm_python, tiny_model) -> Runner:
    return Runner(vllm_python, tiny_model)


@pytest.fixture(scope="module")
def native(run) -> Outcome:
    return run(NATIVE)


def held(stage: str, found: Outcome, native: Outcome):
    result = judge(stage, [found], [native])
    assert result.equal, result.difference
    assert result.ran, [answer.report for answer in found.answers]
    assert result.layers == 4
    assert result.max_logprob_distance < 1e-4
    return result


def test_native_is_untouched(native):
    assert judge(NATIVE, [native], [native]).ran
    assert [len(ids) for ids in native.in_order("ids")] == [6, 4, 6, 2]


def test_one_rank_and_a_spoilt_expert(run, native):
    """The text changes with one expert's sign: the comparison can fail, and the stage reads vLLM's own weights."""
    result = held(ONE, run(ONE, sabotage=HOT), native)
    assert result.sabotage_seen
    assert result.calls_per_rank == [6]


def test_one_rank_under_the_compiler(run, native):
    held(TWO, run(TWO, compiled=True), native)


def test_one_rank_through_the_interpreter(run, native):
    held(THREE, run(THREE), native)


@pytest.mark.parametrize(("which", "spread"), [(ONE, "one"), (TWO, "uneven"), (THREE, "uneven")])
def test_two_ranks_unequal_and_idle(run, native, which, spread):
    """Real all-to-alls over gloo. "one": the second rank has no request at all and only follows."""
    result = held(which, run(which, dp=2, spread=spread), native)
    assert len(set(result.calls_per_rank)) == 1, result.calls_per_rank


def test_two_tensor_parallel_ranks_divide_the_tokens(run, native):
    held(TWO, run(TWO, tp=2), native)


def test_what_cannot_run_ends_the_start_with_the_reason(run):
    """bfloat16 products are wrong in Triton's interpreter, so the stage refuses them on a CPU."""
    with pytest.raises(RankFailedError, match=r"torch\.bfloat16 does not work on a CPU"):
        run(THREE, dtype="bfloat16")


def test_an_allow_list_without_us_means_off(run, native):
    found = run(ONE, {"VLLM_PLUGINS": "somebody_else"})
    assert found.in_order("ids") == native.in_order("ids")
    assert all(not answer.report["layers"] for answer in found.answers)
