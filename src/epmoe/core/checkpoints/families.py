"""What each supported architecture calls its tensors, and how its config becomes a shape and a router.

Names are those of published checkpoints (one tensor per expert and projection). Sources: the checkpoints of
GLM-4.5, Qwen3-MoE, Mixtral and DeepSeek-V3, and the weight mappings of transformers.
Legend: H hidden, I intermediate, E experts, K experts per token.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epmoe.core.errors import InputError
from epmoe.core.routing import RouterConfig
from epmoe.core.shape import MoEShape


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture's tensor names below `model.layers.N.<block>.` and the reading of its config.

    Attributes:
        block: name of the MoE block inside a layer.
        gate, up, down: projection names inside an expert; `gate` is the one that goes through silu.
        shared: name of the shared expert below the block, None for none.
        biased: whether the router has an e_score_correction_bias.
        shape: config -> MoEShape.
        moe_layers: config -> indices of the layers that are MoE.
    """

    block: str
    gate: str
    up: str
    down: str
    shared: str | None
    biased: bool
    shape: Callable[[Any], MoEShape]
    moe_layers: Callable[[Any], tuple[int, ...]]

    def stem(self, layer: int) -> str:
        """What the names of all tensors of one MoE block begin with."""
        return f"model.layers.{layer}.{self.block}"

    def below_stem(self, name: str) -> tuple[int, str] | None:
        """(layer, what follows the stem) of a tensor's name, None for one outside of these blocks."""
        found = re.fullmatch(rf"model\.layers\.([0-9]{{1,9}})\.{self.block}\.(.+)", name)
        return (int(found[1]), found[2]) if found else None

    def computes_with(self, name: str, shape: MoEShape) -> bool:
        """Whether an MoE block of `shape` has a tensor of this name below its stem."""
        if name == "gate.weight":
            return True
        if name == "gate.e_score_correction_bias":
            return self.biased
        found = re.fullmatch(rf"(.+)\.(?:{self.gate}|{self.up}|{self.down})\.weight", name)
        return found is not None and self._owns_projections(found[1], shape)

    def _owns_projections(self, owner: str, shape: MoEShape) -> bool:
        if owner == self.shared:
            return shape.shared_intermediate > 0
        expert = re.fullmatch(r"experts\.([0-9]{1,9})", owner)
        return expert is not None and int(expert[1]) < shape.experts


def _after_dense(config: Any) -> tuple[int, ...]:
    first = config.first_k_dense_replace
    every = getattr(config, "moe_layer_freq", 1) or 1
    return tuple(i for i in range(first, config.num_hidden_layers) if i % every == 0)


def _sparse_steps(config: Any) -> tuple[int, ...]:
    dense = set(config.mlp_only_layers or ())
    step = config.decoder_sparse_step
    layers = range(config.num_hidden_layers)
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)


def _every_layer(config: Any) -> tuple[int, ...]:
    return tuple(range(config.num_hidden_layers))


def _sigmoid_shape(config: Any) -> MoEShape:
    scoring = getattr(config, "scoring_func", "sigmoid")
    if scoring != "sigmoid":
        raise InputError(
            f"scoring_func={scoring!r} in the config: this architecture is read with 'sigmoid' only"
        )
    return MoEShape(
        name=config.model_type,
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        topk=config.num_experts_per_tok,
        shared_intermediate=config.moe_intermediate_size * (config.n_shared_experts or 0),
        router=RouterConfig(
            scoring="sigmoid",
            renormalize=config.norm_topk_prob,
            groups=config.n_group,
            topk_groups=config.topk_group,
            scale=float(config.routed_scaling_factor),
        ),
        layers=max(1, len(_after_dense(config))),
    )


def _qwen_shape(config: Any) -> MoEShape:
    return MoEShape(
        name=config.model_type,
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
        experts=config.num_experts,
        topk=config.num_experts_per_tok,
        router=RouterConfig(scoring="softmax", renormalize=config.norm_topk_prob),
        layers=max(1, len(_sparse_steps(config))),
    )


def _mixtral_shape(config: Any) -> MoEShape:
    return MoEShape(
        name=config.model_type,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        experts=config.num_local_experts,
        topk=config.num_experts_per_tok,
        router=RouterConfig(scoring="softmax", renormalize=True),
        layers=config.num_hidden_layers,
    )


_SIGMOID = Family(
    block="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    shared="shared_experts",
    biased=True,
    shape=_sigmoid_shape,
    moe_layers=_after_dense,
)

FAMILIES: dict[str, Family] = {
    "Glm4MoeForCausalLM": _SIGMOID,
    "DeepseekV3ForCausalLM": _SIGMOID,
    "Qwen3MoeForCausalLM": Family(
        block="mlp",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        shared=None,
        biased=False,
        shape=_qwen_shape,
        moe_layers=_sparse_steps,
    ),
    "MixtralForCausalLM": Family(
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
        shared=None,
        biased=False,
        shape=_mixtral_shape,
        moe_layers=_every_layer,
    ),
}


def family_of(architecture: str) -> Family:
    """The family of an architecture name of config.json. Raises InputError with the supported names."""
    if architecture not in FAMILIES:
        raise InputError(
            f"architecture {architecture!r} is not supported: this reads {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]
