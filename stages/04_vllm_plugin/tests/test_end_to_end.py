"""A real model's text with its experts on a stage: the same ids as from vLLM alone, others once an expert is spoilt.

Every engine is a process or two of its own, forked from one that has imported vLLM; one test makes a fresh start.
vLLM's own expert parallelism does not run on its CPU backend, so what the stages are held against is vLLM on one rank.
The fused stage runs its real kernels through Triton's interpreter, which is slow: it gets short prompts and few tokens.
"""

import json
import subprocess

import pytest

from epmoe.core.errors import RankFailedError
from epmoe.vllm_plugin import engines
from epmoe.vllm_plugin.compare import Outcome, Plan, job_for, tokenise
from epmoe.vllm_plugin.jobs import Request
from epmoe.vllm_plugin.judge import judge
from epmoe.vllm_plugin.settings import NATIVE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
LONG = True

PROMPTS = ("import os\n", "def", "class A:", "for i in ")
HOT = 0  # an expert that these prompts use in every MoE layer
LIMITS = {"max_model_len": 64, "max_num_batched_tokens": 64}
# vLLM compiles how it counts ranks of tokens even in an eager engine: seconds in each process, for nothing held here
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
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
        engine = LIMITS | plan.pop("engine", {})
        stages = tuple(dict.fromkeys((NATIVE, stage)))
        asked = Plan(model=self.model, stages=stages, engine=engine, **plan)
        job, order = job_for(asked, stage, self.requests())
        variables = ({} if asked.compiled else EAGER) | (variables or {})
        answers = engines.run(job, self.python, "cpu", 360, variables)
        return Outcome(job, answers, order)


@pytest.fixture(scope="module")
def run(warm_python, tiny_model) -> Runner:
    return Runner(warm_python, tiny_model)


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
    """Both, one after the other: what vLLM keeps on disk of the one must not be taken for the other."""
    assert run(NATIVE, compiled=True).in_order("ids") == native.in_order("ids")
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


def test_a_quantised_model_ends_the_start_with_the_reason(run):
    with pytest.raises(
        RankFailedError, match=r"cannot run model\.layers\.1.*quantised or held by Fp8"
    ):
        run(TWO, dtype="bfloat16", engine={"quantization": "fp8"})


def test_workers_in_processes_of_their_own_tell_what_they_ran(
    vllm_python, tiny_model, native, tmp_path
):
    """vLLM's default: the engine and its workers are spawned. The worker itself says that the stage was there."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "EPMOE_REPORT": str(tmp_path)}
    found = Runner(vllm_python, tiny_model)(ONE, variables)
    assert found.in_order("ids") == native.in_order("ids")
    assert found.answers[0].report["layers"] == [], "the front end has no layers"
    told = json.loads((tmp_path / "rank-0.json").read_text())
    assert [layer["stage"] for layer in told["layers"]] == [ONE] * 4
    assert all(layer["calls"] >= 4 for layer in told["layers"])


SWITCH = """
import os, sys
import vllm.plugins as plugins
from vllm.model_executor.custom_op import op_registry_oot

def load(**variables):
    for name in ("EPMOE_STAGE", "VLLM_PLUGINS"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    print("MoERunner" in op_registry_oot, end=" ")

load()
load(EPMOE_STAGE="native")
load(EPMOE_STAGE="01", VLLM_PLUGINS="somebody_else")
load(EPMOE_STAGE="01", VLLM_PLUGINS="epmoe,somebody_else")
load(EPMOE_STAGE="01")  # twice, as in some of vLLM's processes
sys.stdout.flush()
load(EPMOE_STAGE="fast")
"""


def test_on_off_twice_and_unknown(warm_python, tmp_path):
    """Off means that nothing of vLLM is replaced; an unknown stage ends the start with the list."""
    env = engines.environment(NATIVE, "cpu", {})
    program = tmp_path / "switch.py"
    program.write_text(SWITCH)
    done = subprocess.run(
        [warm_python, str(program)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "False False False True True" in done.stdout, done.stdout + done.stderr[-2000:]
    assert done.returncode != 0
    assert "EPMOE_STAGE=fast: no stage called 'fast'" in done.stderr
    assert "01_variable_a2a" in done.stderr
