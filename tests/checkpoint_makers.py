"""Small random checkpoints of every family that epmoe.core.checkpoints reads, for its tests."""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from epmoe.core.weights import ExpertWeights

SIZES = {
    "vocab_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def glm(hidden: int = 64, inner: int = 32) -> Glm4MoeConfig:
    return Glm4MoeConfig(
        **SIZES,
        hidden_size=hidden,
        intermediate_size=48,
        moe_intermediate_size=inner,
        n_routed_experts=8,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        head_dim=32,
        num_nextn_predict_layers=0,
    )


def deepseek(hidden: int = 64, inner: int = 32) -> DeepseekV3Config:
    return DeepseekV3Config(
        **SIZES,
        hidden_size=hidden,
        intermediate_size=48,
        moe_intermediate_size=inner,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )


def qwen(hidden: int = 64, inner: int = 32) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **SIZES,
        hidden_size=hidden,
        intermediate_size=48,
        moe_intermediate_size=inner,
        num_experts=8,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
        head_dim=32,
    )


def mixtral(hidden: int = 64, inner: int = 32) -> MixtralConfig:
    return MixtralConfig(
        **SIZES, hidden_size=hidden, intermediate_size=inner, num_local_experts=8, head_dim=32
    )


FAMILIES = {"glm4_moe": glm, "deepseek_v3": deepseek, "qwen3_moe": qwen, "mixtral": mixtral}


def make_model(config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, value in model.state_dict().items():
        if (
            name.endswith("e_score_correction_bias")
            or "experts" in name
            or name.endswith("gate.weight")
        ):
            value.copy_(torch.randn_like(value) * 0.1)
    return model


def save_model(family: str, folder: Path, **options) -> torch.nn.Module:
    """Save a model of `family` (a key of FAMILIES) in `folder` and return it."""
    model = make_model(FAMILIES[family]())
    model.save_pretrained(folder, **options)
    return model


def run_expert(weights: ExpertWeights, e: int, x: torch.Tensor) -> torch.Tensor:
    """f(x) of one expert, spelled out from the meaning of w13 (gate first) and w2."""
    gate, up = weights.w13_E2IH[e].chunk(2, dim=0)
    return (F.silu(x @ gate.T) * (x @ up.T)) @ weights.w2_EHI[e].T
