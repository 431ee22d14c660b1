"""Reading one MoE layer out of checkpoints of every supported family.

The checkpoints are small and random, written by transformers' own save_pretrained, and what is read is held against
the tensors and the output of transformers' own modules.
"""

import shutil
from pathlib import Path

import pytest
import torch
from tests.checkpoint_makers import FAMILIES, make_model, run_expert, save_model

from epmoe.core.checkpoints import files as checkpoint_files
from epmoe.core.checkpoints import inspect, load_layer
from epmoe.core.routing import RouterConfig

MOE_LAYERS = {
    "glm4_moe": (1, 2),
    "deepseek_v3": (2,),
    "qwen3_moe": (0, 2),
    "mixtral": (0, 1, 2),
}
SOFTMAX = RouterConfig(scoring="softmax", renormalize=True)
ROUTERS = {
    "glm4_moe": RouterConfig(scoring="sigmoid", renormalize=True, scale=1.5),
    "deepseek_v3": RouterConfig(
        scoring="sigmoid", renormalize=True, groups=4, topk_groups=2, scale=2.5
    ),
    "qwen3_moe": SOFTMAX,
    "mixtral": SOFTMAX,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, tuple[Path, torch.nn.Module]]:
    """Family name -> (folder in two or more shards, the model it was saved from)."""
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    return {f: (p, save_model(f, p, max_shard_size="200KB")) for f, p in folders.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_tells_sizes_router_and_layers(saved, family):
    info = inspect(saved[family][0])
    assert info.moe_layers == MOE_LAYERS[family]
    assert info.router == info.shape.router == ROUTERS[family]
    shape = info.shape
    assert (shape.hidden, shape.intermediate, shape.experts, shape.topk) == (64, 32, 8, 2)
    assert shape.layers == len(info.moe_layers)
    assert info.dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        ("qwen3_moe", {"decoder_sparse_step": 3, "mlp_only_layers": []}),
        ("glm4_moe", {"first_k_dense_replace": 3}),
        ("deepseek_v3", {"first_k_dense_replace": 0}),
    ],
    ids=["every-2nd", "every-2nd-but-3", "every-3rd", "after-3", "all"],
)
def test_moe_layers_are_those_the_model_builds(tmp_path, family, changes):
    config = FAMILIES[family]()
    config.update({"num_hidden_layers": 6, "layer_types": None} | changes)
    model = make_model(config)
    model.save_pretrained(tmp_path)
    built = tuple(i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts"))
    assert len(built) > 0
    assert inspect(tmp_path).moe_layers == built


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_the_fixture_are_sharded(saved, family):
    assert len(list(saved[family][0].glob("model-*.safetensors"))) >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_those_of_the_module(saved, family):
    folder, model = saved[family]
    for layer in MOE_LAYERS[family]:
        block = model.model.layers[layer].mlp
        read = load_layer(folder, layer)
        assert torch.equal(read.experts.w13_E2IH, block.experts.gate_up_proj)
        assert torch.equal(read.experts.w2_EHI, block.experts.down_proj)
        assert torch.equal(read.router.weight_EH, block.gate.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_computes_what_the_module_computes(saved, family):
    folder, model = saved[family]
    layer = MOE_LAYERS[family][-1]
    info, read = inspect(folder), load_layer(folder, layer)
    x_TH = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    ids_TK, weights_TK = read.router(x_TH)
    y_TH = torch.zeros_like(x_TH)
    for t in range(len(x_TH)):
        for k in range(info.shape.topk):
            y_TH[t] += weights_TK[t, k] * run_expert(read.experts, int(ids_TK[t, k]), x_TH[t])
    if read.shared is not None:
        y_TH += run_expert(read.shared, 0, x_TH)
    with torch.no_grad():
        wanted_TH = model.model.layers[layer].mlp(x_TH[None]).reshape(9, 64)
    torch.testing.assert_close(y_TH, wanted_TH, atol=1e-5, rtol=1e-4)


def test_shared_expert_and_bias_exist_where_the_architecture_has_them(saved):
    for family, width in (("glm4_moe", 64), ("deepseek_v3", 32)):
        read = load_layer(saved[family][0], MOE_LAYERS[family][0])
        assert read.shared is not None
        assert read.shared.w2_EHI.shape == (1, 64, width)
        assert read.router.bias_E is not None
        assert read.router.bias_E.abs().max() > 0
    for family in ("qwen3_moe", "mixtral"):
        read = load_layer(saved[family][0], 0)
        assert read.shared is None
        assert read.router.bias_E is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (64, 64)], ids=["H=2I", "H=I"])
def test_gate_comes_first_where_shapes_say_nothing(tmp_path, family, hidden, inner):
    model = make_model(FAMILIES[family](hidden, inner))
    layer = MOE_LAYERS[family][0]
    experts = model.model.layers[layer].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[:, :inner] = 2.0
        experts.gate_up_proj[:, inner:] = 3.0
        experts.down_proj.copy_(torch.arange(hidden * inner).view(hidden, inner))
    model.save_pretrained(tmp_path)
    read = load_layer(tmp_path, layer, experts=[5]).experts
    assert (read.w13_E2IH[:, :inner] == 2.0).all()
    assert (read.w13_E2IH[:, inner:] == 3.0).all()
    assert torch.equal(read.w2_EHI[0], torch.arange(hidden * inner).view(hidden, inner).float())


class CountingFile:
    """A safetensors file that notes which tensors are read."""

    def __init__(self, file, read: list[str]):
        self.file, self.read = file, read

    def __enter__(self):
        return CountingFile(self.file.__enter__(), self.read)

    def __exit__(self, *details):
        return self.file.__exit__(*details)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return self.file.get_slice(name)  # a header look-up: no data until it is indexed

    def get_tensor(self, name):
        self.read.append(name)
        return self.file.get_tensor(name)


@pytest.fixture
def tensors_read(monkeypatch) -> list[str]:
    names: list[str] = []
    real = checkpoint_files.safe_open

    def counting(*args, **kwargs):
        return CountingFile(real(*args, **kwargs), names)

    monkeypatch.setattr(checkpoint_files, "safe_open", counting)
    return names


def test_only_the_asked_experts_are_read(saved, tensors_read):
    load_layer(saved["mixtral"][0], 1, experts=[6, 2])
    stem = "model.layers.1.block_sparse_moe"
    wanted = {f"{stem}.experts.{e}.{w}.weight" for e in (6, 2) for w in ("w1", "w2", "w3")}
    assert sorted(tensors_read) == sorted(wanted | {f"{stem}.gate.weight"})


def test_inspect_reads_no_tensor(saved, tensors_read):
    inspect(saved["deepseek_v3"][0])
    assert tensors_read == []


def test_experts_come_in_the_asked_order_with_repeats(saved):
    folder, model = saved["qwen3_moe"]
    read = load_layer(folder, 2, experts=[7, 0, 7])
    packed = model.model.layers[2].mlp.experts
    assert torch.equal(read.experts.w13_E2IH, packed.gate_up_proj[[7, 0, 7]])
    assert torch.equal(read.experts.w2_EHI, packed.down_proj[[7, 0, 7]])


def test_no_experts_give_empty_weights(saved):
    read = load_layer(saved["qwen3_moe"][0], 2, experts=[])
    assert read.experts.w13_E2IH.shape == (0, 64, 64)
    assert read.experts.w2_EHI.shape == (0, 64, 32)


def test_dtype_converts_experts_and_leaves_the_router_exact(saved):
    folder, model = saved["glm4_moe"]
    read = load_layer(folder, 1, experts=[3], dtype=torch.bfloat16)
    block = model.model.layers[1].mlp
    assert torch.equal(read.experts.w2_EHI[0], block.experts.down_proj[3].bfloat16())
    assert read.shared is not None
    assert read.shared.dtype == torch.bfloat16
    assert torch.equal(read.router.weight_EH, block.gate.weight)
    assert read.router.bias_E is not None
    assert torch.equal(read.router.bias_E, block.gate.e_score_correction_bias)


def test_loaded_weights_outlive_the_files(tmp_path):
    save_model("glm4_moe", tmp_path)
    read = load_layer(tmp_path, 1)
    before = read.router.weight_EH.clone(), read.experts.w2_EHI.clone()
    shutil.rmtree(tmp_path)
    assert torch.equal(read.router.weight_EH, before[0])
    assert torch.equal(read.experts.w2_EHI, before[1])
