"""models/make_random_glm.py writes a checkpoint that everybody reads, with the sizes of the named shape."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from epmoe.core.checkpoints import inspect, load_layer
from epmoe.core.shape import named_shape

SCRIPT = Path(__file__).parents[1] / "models" / "make_random_glm.py"


def test_the_checkpoint_has_the_shape_and_runs(tmp_path):
    arguments = ["--shape", "tiny", "--layers", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    shape = named_shape("tiny")
    loaded = load_layer(tmp_path, 2)
    assert loaded.experts.w13_E2IH.shape == (shape.experts, 2 * shape.intermediate, shape.hidden)
    assert inspect(tmp_path).shape.topk == shape.topk
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    ids = AutoTokenizer.from_pretrained(tmp_path)("def f", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.1  # activations kept their size, and the head sees something
