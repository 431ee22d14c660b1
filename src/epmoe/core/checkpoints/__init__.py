"""Real input: one MoE layer, and the activations that enter it, from a checkpoint in the published layout.

A rank reads only the experts that it owns: the files are memory-mapped and each expert is a tensor of its own.

    info = inspect("models/tiny-glm-moe")
    weights = load_layer(info.path, info.moe_layers[0], experts=[0, 1])
    x_TH = hidden_states(info.path, info.moe_layers[0], "def main():", max_tokens=8)

Legend: T tokens, H hidden, I intermediate, E experts, n experts asked for.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from epmoe.core.checkpoints.config import (
    by_transformers,
    load_config,
    load_model,
    read_config,
    read_sizes,
)
from epmoe.core.checkpoints.families import Family, family_of
from epmoe.core.checkpoints.files import PLAIN, TensorFiles
from epmoe.core.errors import InputError
from epmoe.core.routing import Router, RouterConfig
from epmoe.core.shape import MoEShape
from epmoe.core.values import check_whole, dtype_name, is_whole
from epmoe.core.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint folder holds.

    Attributes:
        path: the folder.
        architecture: the class name in config.json, such as "Glm4MoeForCausalLM".
        shape: sizes of its MoE layers (all alike), `shape.layers` of them.
        router: how its logits become ids and weights; the same object as shape.router.
        moe_layers: indices of the layers that are MoE, ascending.
        dtype: what the experts are stored in.
    """

    path: Path
    architecture: str
    shape: MoEShape
    router: RouterConfig
    moe_layers: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of one MoE layer.

    Attributes:
        experts: w13 [n, 2I, H] (gate rows first, then up) and w2 [n, H, I], in the order asked for.
        router: of all E experts, in float32; its bias_E is None for softmax routers.
        shared: the shared expert as an ExpertWeights of one expert, None for none.
    """

    experts: ExpertWeights
    router: Router
    shared: ExpertWeights | None


def inspect(path: str | Path) -> CheckpointInfo:
    """Read config.json and the tensor headers of the checkpoint folder `path`; loads no weights.

    Raises:
        InputError: no checkpoint there, an architecture or an activation that is not supported, quantised weights,
            experts packed into one tensor, a tensor that the layers here have no use for, no MoE layer.
    """
    folder = Path(path)
    architecture, config = read_config(folder)
    family = family_of(architecture)
    shape, layers = read_sizes(folder, family, config)
    if not layers:
        raise InputError(f"{folder} has no MoE layer: its config makes every layer dense")
    with TensorFiles(folder) as files:
        _refuse_left_out(files, family, shape, layers)
        dtype = files.dtype(f"{family.stem(layers[0])}.experts.0.{family.down}.weight")
    return CheckpointInfo(
        path=folder,
        architecture=architecture,
        shape=shape,
        router=shape.router,
        moe_layers=layers,
        dtype=dtype,
    )


def load_layer(
    path: str | Path,
    layer: int,
    experts: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LayerWeights:
    """Load one MoE layer, and of its experts only those asked for.

    Args:
        path: the checkpoint folder.
        layer: index of the layer in the model; it must be one of `inspect(path).moe_layers`.
        experts: global expert ids, in the wanted order (repeats allowed, for replicas); None for all E.
        dtype: of the experts and the shared expert; None keeps what is stored. Router and bias are float32 always:
            a router rounded to 16 bits chooses other experts.
        device: where the result lives.

    Raises:
        InputError: as `inspect`; no such MoE layer; an expert id outside [0, E); a dtype other than float64, float32,
            bfloat16 and float16; a tensor that is missing or whose shape does not fit the config.
    """
    info = inspect(path)
    family, shape = family_of(info.architecture), info.shape
    stem = _moe_stem(info, family, layer)
    wanted = _checked_experts(experts, shape.experts)
    _check_dtype(dtype)
    dtype = dtype or info.dtype
    with TensorFiles(info.path) as files:
        names = [f"{stem}.experts.{e}" for e in wanted]
        routed = _read_experts(files, names, family, shape.hidden, shape.intermediate, dtype)
        router_EH = files.read(f"{stem}.gate.weight", (shape.experts, shape.hidden))
        bias_E = _read_bias(files, stem, family, shape.experts)
        shared = _read_shared(files, stem, family, shape, dtype)
    return LayerWeights(
        experts=routed.to(device),
        router=Router(
            weight_EH=router_EH.to(device, torch.float32),
            bias_E=None if bias_E is None else bias_E.to(device, torch.float32),
            config=info.router,
            topk=shape.topk,
        ),
        shared=None if shared is None else shared.to(device),
    )


def hidden_states(path: str | Path, layer: int, text: str, max_tokens: int = 1024) -> Tensor:
    """x_TH [T, H] that enters the MoE block of `layer` when the model reads `text`: see `hidden_states_of_layers`."""
    return hidden_states_of_layers(path, (layer,), text, max_tokens)[layer]


def hidden_states_of_layers(
    path: str | Path, layers: Sequence[int], text: str, max_tokens: int = 1024
) -> dict[int, Tensor]:
    """The activations that enter the MoE blocks of `layers` in one reading of `text`.

    Runs the transformers model in float32 on the CPU up to the last of these blocks and stops there.

    Returns:
        layer -> x_TH [T, H] float32, T = min(tokens of text, max_tokens).

    Raises:
        InputError: as `load_layer`; weights that do not fit config.json; a text that is no str or has no tokens;
            max_tokens below 1 or above the model's positions.
    """
    info = inspect(path)
    for layer in layers:
        _moe_stem(info, family_of(info.architecture), layer)
    ids_1T = _token_ids(info.path, text, max_tokens)
    model = load_model(info.path)
    seen: dict[int, Tensor] = {}

    def keep(layer: int, inputs: tuple[Tensor, ...]) -> None:
        seen[layer] = inputs[0].detach().reshape(-1, info.shape.hidden).clone()
        if layer == max(layers):
            raise _ReachedLayer

    for layer in layers:
        model.model.layers[layer].mlp.register_forward_pre_hook(
            lambda module, inputs, layer=layer: keep(layer, inputs)
        )
    try:
        with torch.no_grad():
            model(input_ids=ids_1T, use_cache=False)
    except _ReachedLayer:
        pass
    return seen


class _ReachedLayer(Exception):
    """Ends a forward pass: what comes after the asked layer is not needed."""


def _token_ids(path: Path, text: str, max_tokens: int) -> Tensor:
    from transformers import AutoTokenizer

    if not isinstance(text, str):
        raise InputError(f"text is a {type(text).__name__}: give one str")
    check_whole("max_tokens", max_tokens, 1, load_config(path).max_position_embeddings)
    tokenizer = by_transformers(AutoTokenizer.from_pretrained, path, "tokenizer")
    ids = tokenizer(text)["input_ids"][:max_tokens]
    if not ids:
        raise InputError("text gives no tokens: pass at least one character")
    return torch.tensor([ids])


def _refuse_left_out(
    files: TensorFiles, family: Family, shape: MoEShape, layers: tuple[int, ...]
) -> None:
    """A tensor that nothing here would read, such as a bias or a scale, shows a layer that computes otherwise."""
    of_layers = set(layers)
    for name in files.names():
        layer, below = family.below_stem(name) or (None, "")
        if layer not in of_layers or family.computes_with(below, shape):
            continue
        if re.match(r"experts\.(?!\d)", below):
            raise InputError(
                f"tensor {name} packs all experts into one: only the published layout (one tensor per expert and "
                "projection) is read; save_pretrained(save_original_format=True) of transformers 5 writes it"
            )
        raise InputError(
            f"tensor {name} is no part of the MoE layers that config.json describes, and would be left out: give a "
            "checkpoint as it was published, unquantised"
        )


def _moe_stem(info: CheckpointInfo, family: Family, layer: int) -> str:
    if not is_whole(layer) or layer not in info.moe_layers:
        known = ", ".join(map(str, info.moe_layers))
        raise InputError(f"layer {layer} of {info.path} is no MoE layer: choose one of {known}")
    return family.stem(layer)


def _checked_experts(experts: Sequence[int] | None, count: int) -> list[int]:
    if not isinstance(experts, Sequence | None):
        raise InputError(f"experts={experts!r}: give a sequence of expert ids, or None for all")
    wanted = list(range(count) if experts is None else experts)
    for expert in wanted:
        if not is_whole(expert) or not 0 <= expert < count:
            raise InputError(f"expert {expert!r} does not exist: ids go from 0 to {count - 1}")
    return wanted


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in PLAIN.values():
        known = ", ".join(map(dtype_name, PLAIN.values()))
        raise InputError(f"dtype={dtype!r}: weights are given as {known}, or as stored with None")


def _read_experts(
    files: TensorFiles,
    names: list[str],
    family: Family,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
) -> ExpertWeights:
    w13_n2IH = torch.empty(len(names), 2 * inner, hidden, dtype=dtype)
    w2_nHI = torch.empty(len(names), hidden, inner, dtype=dtype)
    for slot, name in enumerate(names):
        # by declared name, never by shape: with H = 2I or H = I a shape says nothing
        w13_n2IH[slot, :inner] = files.read(f"{name}.{family.gate}.weight", (inner, hidden))
        w13_n2IH[slot, inner:] = files.read(f"{name}.{family.up}.weight", (inner, hidden))
        w2_nHI[slot] = files.read(f"{name}.{family.down}.weight", (hidden, inner))
    return ExpertWeights(w13_n2IH, w2_nHI)


def _read_bias(files: TensorFiles, stem: str, family: Family, experts: int) -> Tensor | None:
    return files.read(f"{stem}.gate.e_score_correction_bias", (experts,)) if family.biased else None


def _read_shared(
    files: TensorFiles, stem: str, family: Family, shape: MoEShape, dtype: torch.dtype
) -> ExpertWeights | None:
    if family.shared is None or not shape.shared_intermediate:
        return None
    names = [f"{stem}.{family.shared}"]
    return _read_experts(files, names, family, shape.hidden, shape.shared_intermediate, dtype)
