"""The tiny GLM-4-MoE: its configuration, its tokenizer, and how it is written to disk.

The layout on disk is the one of the checkpoints people publish (one tensor per expert and projection),
which is also what vLLM reads; transformers packs the experts into one tensor when it loads them.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_data import EOS_ID, PAD_ID, VOCAB_SIZE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedTokenizerFast,
)

EOS, PAD = "<|endoftext|>", "<|pad|>"


def make_config() -> Glm4MoeConfig:
    """One dense layer, four MoE layers of 32 experts, top-4, sigmoid router with correction bias."""
    return Glm4MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=5,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        use_qk_norm=True,
        attention_bias=False,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        num_nextn_predict_layers=0,
        architectures=["Glm4MoeForCausalLM"],
    )


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    The field's convention (GPT-2): printable Latin-1 stands for itself, the rest moves to U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose id for byte b is b: byte-level, no merges, plus the two special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(EOS, special=True), AddedToken(PAD, special=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    if tokenizer.convert_tokens_to_ids([EOS, PAD]) != [EOS_ID, PAD_ID]:
        raise RuntimeError("the special tokens did not get the ids that the training data uses")
    return tokenizer


def hub_tensors(model: Glm4MoeForCausalLM) -> dict[str, torch.Tensor]:
    """The model's tensors by their published names: bf16, the correction bias float32."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        for hub_name, part in unpacked(name, value.detach()):
            tensors[hub_name] = part.to("cpu", dtype).clone().contiguous()
    return tensors


def unpacked(name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """transformers' tensor as the published ones: packed experts one by one, all others as they are."""
    stem, _, last = name.rpartition(".")
    if not stem.endswith(".experts"):
        return [(name, value)]
    if last == "down_proj":
        return [(f"{stem}.{e}.down_proj.weight", row) for e, row in enumerate(value)]
    halves = [row.chunk(2, dim=0) for row in value]  # gate first, then up
    gates = [(f"{stem}.{e}.gate_proj.weight", half[0]) for e, half in enumerate(halves)]
    return gates + [(f"{stem}.{e}.up_proj.weight", half[1]) for e, half in enumerate(halves)]


def save_checkpoint(model: Glm4MoeForCausalLM, out: Path) -> None:
    """Write config, weights, tokenizer and generation config to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(hub_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    config = make_config()
    config.dtype = torch.bfloat16
    config.save_pretrained(out)
    _declare_no_extra_layers(out / "config.json")
    make_tokenizer().save_pretrained(out)
    _name_tokenizer_class(out / "tokenizer_config.json")
    GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    ).save_pretrained(out)


def _declare_no_extra_layers(path: Path) -> None:
    """Published GLM configs name the multi-token-prediction layers num_nextn_predict_layers."""
    values = json.loads(path.read_text())
    values.pop("num_mtp_layers", None)
    values.update(num_nextn_predict_layers=0, partial_rotary_factor=0.5, rope_theta=10000.0)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _name_tokenizer_class(path: Path) -> None:
    """The class name that every transformers release with fast tokenizers knows."""
    values = json.loads(path.read_text())
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
