"""The committed checkpoint models/tiny-glm-moe, and the script that trains it."""

import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tests.checkpoint_makers import run_expert
from transformers import AutoModelForCausalLM, AutoTokenizer

from epmoe.core.checkpoints import hidden_states, inspect, load_layer
from epmoe.core.errors import InputError

MODELS = Path(__file__).parents[1] / "models"
TINY = MODELS / "tiny-glm-moe"
SCRIPT = MODELS / "train_tiny_glm_moe.py"

# Written for this test, so no training run has seen it.
TEXT = '''class Ledger:
    """Counts what each call sends."""

    def __init__(self, name):
        self.name = name
        self.entries = []

    def add(self, size):
        if size < 0:
            raise ValueError("size must not be negative")
        self.entries.append(size)
        return len(self.entries)

    def total(self):
        return sum(entry for entry in self.entries)
'''


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def held_out_text() -> bytes:
    """The start of standard-library files that training never saw, whatever the Python release."""
    sys.path.insert(0, str(MODELS))
    try:
        import tiny_data
    finally:
        sys.path.remove(str(MODELS))
    root = Path(sysconfig.get_path("stdlib"))
    files = tiny_data.source_files(root)
    held_out = [f for f in files if tiny_data.is_held_out(f.relative_to(root).as_posix())]
    return b"".join(f.read_bytes()[:1500] for f in held_out[:8])


def test_loads_without_missing_or_unexpected_tensors():
    _, report = AutoModelForCausalLM.from_pretrained(TINY, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_is_in_the_published_layout():
    with safe_open(TINY / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        bias = file.get_slice("model.layers.1.mlp.gate.e_score_correction_bias").get_dtype()
        weight = file.get_slice("model.layers.1.mlp.experts.31.up_proj.weight").get_dtype()
    assert not [n for n in names if n.endswith("gate_up_proj")]
    assert (bias, weight) == ("F32", "BF16")


def test_is_small_enough_to_commit():
    assert sum(f.stat().st_size for f in TINY.iterdir()) < 8 * 2**20


def test_inspect_knows_it():
    info = inspect(TINY)
    assert info.architecture == "Glm4MoeForCausalLM"
    assert info.moe_layers == (1, 2, 3, 4)
    shape = info.shape
    assert (shape.hidden, shape.intermediate, shape.experts, shape.topk) == (128, 64, 32, 4)
    assert (shape.shared_intermediate, info.router.scale) == (64, 1.5)
    assert info.dtype == torch.bfloat16


def test_a_token_is_a_byte(tokenizer):
    text = "def f(x):\n\treturn 'é'\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)


def test_predicts_held_out_text_far_better_than_chance(model):
    ids = torch.tensor(list(held_out_text()[:8192])).view(-1, 512)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    assert (
        loss / math.log(2) < 2.0
    )  # uniform: 8.32 bits; a text's byte frequencies alone: about 4.5


def test_generates_text_that_looks_like_python(model, tokenizer):
    prompt = "class Reader:\n    def __init__(self, path):\n"
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(input_ids=inputs["input_ids"], max_new_tokens=60, do_sample=False)
    text = tokenizer.decode(out[0])
    assert text.startswith(prompt)
    assert "        self." in text[len(prompt) :]  # indented one level deeper, and about self


@pytest.mark.parametrize("layer", [1, 2, 3, 4])
def test_routing_is_uneven_and_no_expert_is_dead(layer):
    info, read = inspect(TINY), load_layer(TINY, layer, experts=[])
    text = held_out_text()[:8192].decode("latin-1")
    x_TH = torch.cat(
        [hidden_states(TINY, layer, text[i : i + 1000], 1024) for i in range(0, 8000, 1000)]
    )
    ids_TK, weights_TK = read.router(x_TH)
    load_E = torch.bincount(ids_TK.flatten(), minlength=info.shape.experts).float()
    assert load_E.min() > 0
    assert 1.5 < (load_E.max() / load_E.mean()).item() < 6
    sharpness = (weights_TK.max(1).values / weights_TK.sum(1)).mean().item()
    assert sharpness > 0.35  # equal weights of four experts would give 0.25


def test_layer_gives_the_real_blocks_output_on_real_activations(model, tokenizer):
    layer = 2
    info, read = inspect(TINY), load_layer(TINY, layer, dtype=torch.float32)
    x_TH = hidden_states(TINY, layer, TEXT, max_tokens=24)
    assert x_TH.shape == (24, 128)
    ids_TK, weights_TK = read.router(x_TH)
    assert read.shared is not None
    y_TH = run_expert(read.shared, 0, x_TH)
    for t in range(24):
        for k in range(info.shape.topk):
            y_TH[t] += weights_TK[t, k] * run_expert(read.experts, int(ids_TK[t, k]), x_TH[t])
    seen = {}

    def keep(module, inputs, output):
        seen.update(x=inputs[0], y=output)

    handle = model.model.layers[layer].mlp.register_forward_hook(keep)
    with torch.no_grad():
        model(input_ids=torch.tensor([list(TEXT.encode())[:24]]))
    handle.remove()
    torch.testing.assert_close(x_TH, seen["x"][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y_TH, seen["y"][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "max_tokens", "said"),
    [
        ("", 8, "no tokens"),
        ("x", 0, "max_tokens=0"),
        ("x", 4096, "max_tokens=4096: .* from 1 to 1024"),
    ],
    ids=["no-text", "no-token", "too-many"],
)
def test_hidden_states_refuse(text, max_tokens, said):
    with pytest.raises(InputError, match=said):
        hidden_states(TINY, 1, text, max_tokens)


def test_card_and_report_agree():
    report = json.loads((TINY / "training.json").read_text())
    card = (TINY / "README.md").read_text()
    assert f"{report['training']['bits']:.3f} bits per byte" in card
    assert report["fast_against_stock"]["max"] < 1e-3
    assert len(report["layers"]) == 4
    assert all(row["max_over_mean"] > 1.2 for row in report["layers"])


@pytest.mark.timeout(240)
def test_training_script_runs_end_to_end(tmp_path):
    command = [sys.executable, str(SCRIPT), "--smoke", "--out", str(tmp_path / "smoke")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    made = {f.name for f in (tmp_path / "smoke").iterdir()}
    assert made == {f.name for f in TINY.iterdir()}
    report = json.loads((tmp_path / "smoke" / "training.json").read_text())
    assert report["training"]["bits"] < math.log2(320)
    assert report["fast_against_stock"]["max"] < 1e-4
    assert inspect(tmp_path / "smoke").shape == inspect(TINY).shape
