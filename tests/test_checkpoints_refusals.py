"""What epmoe.core.checkpoints refuses, and that the message names what is wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint_makers import save_model
from transformers import AutoModelForCausalLM, LlamaConfig

from epmoe.core.checkpoints import hidden_states, inspect, load_layer
from epmoe.core.errors import InputError

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny-glm-moe"


@pytest.fixture
def glm_copy(tmp_path) -> Path:
    """A GLM checkpoint in one file, which a test may spoil."""
    save_model("glm4_moe", tmp_path / "glm")
    return tmp_path / "glm"


def change_config(folder: Path, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("layer", "known"), [(0, "1, 2"), (3, "1, 2"), (-1, "1, 2")])
def test_a_layer_that_is_not_moe_is_refused_with_the_list(glm_copy, layer, known):
    with pytest.raises(InputError, match=f"layer {layer} .* choose one of {known}"):
        load_layer(glm_copy, layer)


@pytest.mark.parametrize("expert", [-1, 8])
def test_expert_out_of_range_is_refused(glm_copy, expert):
    with pytest.raises(InputError, match=f"expert {expert} does not exist: ids go from 0 to 7"):
        load_layer(glm_copy, 1, experts=[0, expert])


def test_unsupported_architecture_lists_the_supported(tmp_path):
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"LlamaForCausalLM.*Glm4MoeForCausalLM.*MixtralForCausalLM"
    ):
        inspect(tmp_path)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        inspect(tmp_path / "nowhere")


def test_missing_weights_are_refused(glm_copy):
    (glm_copy / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        inspect(glm_copy)


def test_missing_shard_is_named(tmp_path):
    save_model("mixtral", tmp_path, max_shard_size="200KB")
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    with pytest.raises(InputError, match=r"names model-0000\d-of-.* which is not in"):
        inspect(tmp_path)


def test_missing_tensor_is_named(glm_copy):
    name = "model.layers.2.mlp.experts.4.up_proj.weight"
    change_tensors(glm_copy, lambda tensors: tensors.pop(name))
    assert load_layer(glm_copy, 2, experts=[3]).experts.experts == 1
    with pytest.raises(InputError, match=f"tensor {name} is missing"):
        load_layer(glm_copy, 2, experts=[4])


def test_shape_that_does_not_fit_the_config_is_named(glm_copy):
    change_config(glm_copy, moe_intermediate_size=16)
    with pytest.raises(InputError, match=r"gate_proj.weight has shape \(32, 64\).*\(16, 64\)"):
        load_layer(glm_copy, 1, experts=[0])


def test_transposed_router_is_refused(glm_copy):
    name = "model.layers.1.mlp.gate.weight"

    def transpose(tensors):
        tensors[name] = tensors[name].T.contiguous()

    change_tensors(glm_copy, transpose)
    with pytest.raises(InputError, match=r"gate.weight has shape \(64, 8\).*\(8, 64\)"):
        load_layer(glm_copy, 1)


def test_quantised_config_is_refused_with_its_method(glm_copy):
    change_config(glm_copy, quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError, match=r"quantised \(fp8\)"):
        inspect(glm_copy)


def test_quantised_tensor_is_refused_where_the_config_is_silent(glm_copy):
    name = "model.layers.1.mlp.experts.0.down_proj.weight"

    def quantise(tensors):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    change_tensors(glm_copy, quantise)
    with pytest.raises(InputError, match=f"{name} is stored as F8_E4M3"):
        inspect(glm_copy)


def test_packed_experts_are_refused_with_the_fix(tmp_path):
    save_model("glm4_moe", tmp_path, save_original_format=False)
    with pytest.raises(InputError, match=r"packs all experts.*save_original_format=True"):
        inspect(tmp_path)


def test_all_dense_model_is_refused(glm_copy):
    change_config(glm_copy, first_k_dense_replace=3)
    with pytest.raises(InputError, match="no MoE layer"):
        inspect(glm_copy)


def test_other_scoring_is_refused(tmp_path):
    save_model("deepseek_v3", tmp_path)
    change_config(tmp_path, scoring_func="softmax")
    with pytest.raises(InputError, match="scoring_func='softmax'"):
        inspect(tmp_path)


def test_another_activation_is_refused(glm_copy):
    change_config(glm_copy, hidden_act="gelu")
    with pytest.raises(InputError, match=r"config\.json: hidden_act='gelu'.* silu or swish"):
        inspect(glm_copy)


def test_silu_under_its_other_name_is_read(glm_copy):
    plain = load_layer(glm_copy, 1, experts=[0]).experts
    change_config(glm_copy, hidden_act="swish")
    assert torch.equal(load_layer(glm_copy, 1, experts=[0]).experts.w2_EHI, plain.w2_EHI)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("glm4_moe", "model.layers.1.mlp.experts.0.down_proj.bias"),
        ("glm4_moe", "model.layers.2.mlp.experts.7.gate_proj.weight_scale_inv"),
        ("glm4_moe", "model.layers.1.mlp.experts.8.up_proj.weight"),
        ("glm4_moe", "model.layers.1.mlp.shared_experts.up_proj.bias"),
        ("glm4_moe", "model.layers.1.mlp.gate.bias"),
        ("qwen3_moe", "model.layers.0.mlp.shared_expert.up_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_tensor_that_would_be_left_out_is_refused(tmp_path, family, name):
    save_model(family, tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(InputError, match=f"tensor {name} is no part of the MoE layers"):
        inspect(tmp_path)


def test_shared_experts_that_the_config_does_not_count_are_refused(glm_copy):
    change_config(glm_copy, n_shared_experts=0)
    with pytest.raises(InputError, match=r"tensor .*mlp\.shared_experts.* is no part"):
        inspect(glm_copy)


def test_layers_behind_the_last_one_may_hold_what_they_like(glm_copy):
    """Published GLM and DeepSeek checkpoints end with layers that predict further tokens."""
    name = "model.layers.3.mlp.experts.0.down_proj.bias"
    change_tensors(glm_copy, lambda tensors: tensors.update({name: torch.ones(1)}))
    assert inspect(glm_copy).moe_layers == (1, 2)


def test_spoiled_file_is_refused(glm_copy):
    (glm_copy / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="no whole safetensors file"):
        inspect(glm_copy)


def test_hidden_states_need_a_tokenizer(glm_copy):
    with pytest.raises(InputError, match="no tokenizer"):
        hidden_states(glm_copy, 1, "text", 8)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"architectures": 5}',
        '{"architectures": [[]]}',
        '{"architectures": ["Glm4MoeForCausalLM"]}',
        '{"architectures": ["Glm4MoeForCausalLM"], "model_type": "nothing"}',
        '{"architectures": ["Glm4MoeForCausalLM"], "quantization_config": 5}',
        '{"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 1000000000000}',
    ],
)
def test_a_config_that_is_none_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=str(tmp_path)) as refused:
        inspect(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_config_without_a_size_is_refused_by_its_name(glm_copy, field):
    change_config(glm_copy, **{field: None})
    with pytest.raises(InputError, match=rf"config\.json.*{field}"):
        inspect(glm_copy)


def with_index(folder: Path, file: str = "part.safetensors") -> Path:
    """One file becomes `part.safetensors`, and an index says that all tensors lie in `file`."""
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(names, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "part.safetensors"


@pytest.mark.parametrize("content", ["{", "[]", '{"x": 1}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused_by_its_name(glm_copy, content):
    with_index(glm_copy)
    (glm_copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json"):
        inspect(glm_copy)


@pytest.mark.parametrize(
    "content",
    ['{"weight_map": {"a": "b"}}', '{"weight_map": {}}', "{"],
    ids=["old", "empty", "none"],
)
def test_a_single_file_goes_before_an_index_as_it_does_in_transformers(glm_copy, content):
    alone = load_layer(glm_copy, 1).experts
    (glm_copy / "model.safetensors.index.json").write_text(content)
    assert torch.equal(load_layer(glm_copy, 1).experts.w13_E2IH, alone.w13_E2IH)
    model = AutoModelForCausalLM.from_pretrained(glm_copy)
    assert torch.equal(model.model.layers[1].mlp.experts.gate_up_proj, alone.w13_E2IH)


def test_a_tensor_that_only_the_index_knows_is_named_with_its_file(glm_copy):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    part = with_index(glm_copy)
    tensors = load_file(part)
    del tensors[name]
    save_file(tensors, part)
    assert load_layer(glm_copy, 1, experts=[2]).experts.experts == 1
    with pytest.raises(
        InputError, match=rf"part\.safetensors holds tensor {name}, which it does not"
    ):
        load_layer(glm_copy, 1, experts=[3])


@pytest.mark.parametrize("file", ["folder", "", "config.json"])
def test_a_shard_that_is_no_file_of_tensors_is_named(glm_copy, file):
    with_index(glm_copy, file)
    (glm_copy / "folder").mkdir()
    with pytest.raises(InputError, match="is no whole safetensors file") as refused:
        inspect(glm_copy)
    assert str(refused.value).startswith(str(glm_copy / file))


def test_a_size_that_is_none_is_refused_with_its_file(glm_copy):
    change_config(glm_copy, num_experts_per_tok=0)
    with pytest.raises(InputError, match=r"config\.json: topk=0"):
        inspect(glm_copy)


def test_a_tokenizer_that_is_none_is_refused_with_its_folder(tmp_path):
    copied = shutil.copytree(TINY, tmp_path / "tiny")
    (copied / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match="holds no tokenizer"):
        hidden_states(copied, inspect(copied).moe_layers[0], "words", 4)
