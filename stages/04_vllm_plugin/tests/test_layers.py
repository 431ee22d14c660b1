"""`epmoe vllm layer`: one real layer on several ranks, made by vLLM's factory and fed with real activations."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


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
