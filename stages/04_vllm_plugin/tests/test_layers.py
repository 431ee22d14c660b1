"""`epmoe vllm layer`: one real layer on several ranks, made by vLLM's factory and fed with real activations."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from epmoe.core.errors import InputError
from epmoe.vllm_plugin import commands, engines, layers


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_four_ranks_with_sequence_parallelism(warm_python, tiny_model, tmp_path):
    """Two data-parallel ranks of two tensor-parallel ones each, to which the model hands tokens cut already."""
    out = tmp_path / "layer.json"
    command = [sys.executable, "-c", "from epmoe.core.cli import main; main()", "vllm", "layer"]
    command += [
        "--model",
        tiny_model,
        "--stages",
        "02",
        "--dp",
        "2",
        "--tp",
        "2",
        "--tokens",
        "5,3",
    ]
    command += ["--sequence-parallel", "--python", warm_python, "--timeout", "360"]
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(out.read_text())
    (result,) = found["results"]
    assert result["right"]
    assert result["distance"] < 1e-5
    assert result["report"]["layers"][0]["ranks"] == 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tokens", "7,x"], "whole numbers"),
        (["--tokens", "7,-2"], "whole numbers"),
        (["--tokens", "7"], "one number for each"),
        (["--device", "gpu"], "cpu, cuda"),
        (["--stages", "native"], "name a stage"),
        (["--stages", ","], "name a stage"),
        (["--stages", "02,native-eager"], "never compiled"),
        (["--stages", "02,02"], "twice"),
        (["--json", "absent/out.json"], "cannot be written"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, monkeypatch, tiny_model, words, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layers, "compare", lambda *arguments: pytest.fail("it runs"))
    monkeypatch.setattr(engines, "find_python", lambda wanted: "python")
    error = CliRunner().invoke(commands.app, ["layer", "--model", tiny_model, *words]).exception
    assert isinstance(error, InputError)
    assert why in str(error)


def test_more_tokens_than_the_text_has_are_refused_before_a_rank_starts(monkeypatch, tiny_model):
    monkeypatch.setattr(layers, "TEXT", "def")
    monkeypatch.setattr(engines, "run_ranks", lambda *arguments: pytest.fail("it runs"))
    plan = layers.LayerPlan(
        model=tiny_model,
        layer=None,
        stages=("02_fixed_capacity",),
        dp=2,
        tp=1,
        sequence_parallel=False,
        tokens=(7, 20),
        dtype="float32",
        device="cpu",
        timeout=30.0,
    )
    with pytest.raises(InputError, match="27 in all"):
        layers.compare(plan, "python", lambda words: None)


def test_negative_tokens_are_no_plan():
    with pytest.raises(InputError, match="at least 0"):
        layers.LayerPlan(
            model="m",
            layer=None,
            stages=("02_fixed_capacity",),
            dp=1,
            tp=1,
            sequence_parallel=False,
            tokens=(-1,),
            dtype="float32",
            device="cpu",
            timeout=30.0,
        )
