"""Checks of what a layer is built from and called with; none of them communicates.

Only `bad_id` reads a device value, so it runs in checked mode alone.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epmoe.core import choosing, registry
from epmoe.core.capabilities import Capabilities, Wishes
from epmoe.core.errors import CapacityError, InputError, NotCapturableError, UnsupportedError
from epmoe.core.placement import Placement, gone_ranks
from epmoe.core.shape import MoEShape
from epmoe.core.values import is_whole
from epmoe.core.weights import ExpertWeights

if TYPE_CHECKING:
    from epmoe.core.layer_spec import LayerSpec


def check_spec(spec: "LayerSpec") -> None:
    """Raise InputError where shape, placement, weights, group, capacity and stage do not fit."""
    _check_kinds(spec)
    shape, weights, placement = spec.shape, spec.weights, spec.placement
    if placement.ranks != spec.group.size or placement.experts != shape.experts:
        raise InputError(
            f"placement maps {placement.experts} experts on {placement.ranks} ranks: "
            f"the shape has {shape.experts} experts and the group {spec.group.size} ranks"
        )
    held = len(placement.experts_of(spec.group.rank))
    expected = (held, shape.hidden, shape.intermediate)
    if tuple(weights.w2_EHI.shape) != expected:
        raise InputError(
            f"w2 has shape {tuple(weights.w2_EHI.shape)}: this rank needs [E_local, H, I] = {expected}"
        )
    if weights.device.type != spec.device.type:
        raise InputError(
            f"weights are on {weights.device}, the group on {spec.device}: move the weights"
        )
    if not is_whole(spec.max_tokens_per_rank) or spec.max_tokens_per_rank < 1:
        raise InputError(f"max_tokens_per_rank={spec.max_tokens_per_rank!r}: must be at least 1")
    if spec.overflow not in ("raise", "rounds"):
        raise InputError(f"overflow={spec.overflow!r}: choose 'raise' or 'rounds'")
    if spec.lost not in ("drop", "renormalise"):
        raise InputError(f"lost={spec.lost!r}: choose 'drop' or 'renormalise'")
    if spec.stage != choosing.AUTO:
        _check_stage(spec)


_KINDS = {
    "shape": (MoEShape, "a MoEShape, such as SHAPES['tiny'] of epmoe.core.shape"),
    "weights": (ExpertWeights, "an ExpertWeights of this rank's experts"),
    "placement": (
        Placement,
        "a Placement, such as epmoe.core.placement.contiguous(experts, ranks)",
    ),
    "wishes": (Wishes, "an epmoe.core.capabilities.Wishes"),
    "check": (bool, "True or False"),
}


def _check_kinds(spec: "LayerSpec") -> None:
    for name, (kind, words) in _KINDS.items():
        value = getattr(spec, name)
        if not isinstance(value, kind):
            raise InputError(f"{name}={value!r:.80}: give {words}")


def fingerprint_of(spec: "LayerSpec") -> dict[str, object]:
    """What must be the same on all ranks of a layer that passed `check_spec`."""
    same = ("stage", "shape", "placement", "dtype", "max_tokens_per_rank")
    same = (*same, "check", "overflow", "lost", "wishes")
    options = sorted((name, repr(value)) for name, value in spec.options.items())
    return {**{name: getattr(spec, name) for name in same}, "options": options}


def ranks_to_mask(spec: "LayerSpec", gone: Iterable[int], capturing: bool) -> tuple[int, ...]:
    """The ranks `gone`, ascending. Raises InputError where they cannot be masked on this layer."""
    if not registry.load(spec.stage).capabilities.maskable:
        raise UnsupportedError(
            f"{spec.stage} is not maskable: build a layer on `placement.without(gone)`, or choose another stage"
        )
    if capturing:
        raise InputError("mask_ranks in a CUDA graph capture: call it between replays")
    return gone_ranks(gone, spec.group.size)


def check_capturable(stage: str, can: Capabilities) -> None:
    """Raise NotCapturableError where a layer of that stage, which can do that, cannot be captured in a CUDA graph."""
    if not can.graph_capturable:
        raise NotCapturableError(
            f"{stage} waits for the host and cannot be captured in a CUDA graph: "
            "run it eagerly, or choose a stage whose capabilities say graph_capturable"
        )


def _check_stage(spec: "LayerSpec") -> None:
    stage = registry.load(spec.stage)
    unknown = sorted(set(spec.options) - set(stage.options))
    if unknown:
        known = ", ".join(stage.options) or "none"
        raise InputError(
            f"{spec.stage} has no option {', '.join(unknown)}: its options are {known}"
        )
    reasons = choosing.reasons_against(stage, choosing.needs(spec), spec.options)
    if reasons:
        raise UnsupportedError(f"{spec.stage} cannot serve this layer: {'; '.join(reasons)}")


def problem_with_call(
    spec: "LayerSpec",
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    max_tokens: int | None,
    capturing: bool,
) -> InputError | None:
    """What is wrong with one call's arguments on this rank, or None; reads shapes and dtypes only."""
    hidden, topk = spec.shape.hidden, spec.shape.topk
    for name, tensor in (("x", x_TH), ("topk_ids", ids_TK), ("topk_weights", weights_TK)):
        if not isinstance(tensor, Tensor):
            return InputError(f"{name} is a {type(tensor).__name__}: give a tensor")
    if max_tokens is not None and (not is_whole(max_tokens) or max_tokens < 0):
        return InputError(f"max_tokens={max_tokens!r}: give a whole number, at least 0")
    if x_TH.dim() != 2 or x_TH.shape[1] != hidden:
        return InputError(f"x has shape {tuple(x_TH.shape)}: expected [T, H] with H={hidden}")
    tokens = x_TH.shape[0]
    for name, tensor in (("topk_ids", ids_TK), ("topk_weights", weights_TK)):
        if tuple(tensor.shape) != (tokens, topk):
            return InputError(
                f"{name} has shape {tuple(tensor.shape)}: expected [T, K] = {(tokens, topk)}"
            )
    if x_TH.dtype != spec.dtype:
        return InputError(f"x is {x_TH.dtype}, the weights are {spec.dtype}: convert x")
    if ids_TK.dtype not in (torch.int32, torch.int64):
        return InputError(f"topk_ids are {ids_TK.dtype}: expected int32 or int64")
    if weights_TK.dtype != torch.float32:
        return InputError(
            f"topk_weights are {weights_TK.dtype}: keep them float32, the sum over K needs it"
        )
    for name, tensor in (("x", x_TH), ("topk_ids", ids_TK), ("topk_weights", weights_TK)):
        if tensor.device.type != spec.device.type:
            return InputError(f"{name} is on {tensor.device}, the layer on {spec.device}: move it")
    return _too_many(spec, tokens, max_tokens, capturing)


def problem_with_logits(
    spec: "LayerSpec", x_TH: Tensor, logits_TE: Tensor, bias_E: Tensor | None
) -> InputError | None:
    """What is wrong with the router's input on this rank, or None; reads shapes and dtypes only."""
    tokens = len(x_TH) if isinstance(x_TH, Tensor) and x_TH.dim() else 0
    experts = spec.shape.experts
    asked = [("logits", logits_TE, "[T, E]", (tokens, experts))]
    asked += [("bias", bias_E, "[E]", (experts,))] if bias_E is not None else []
    for name, tensor, words, shape in asked:
        if not isinstance(tensor, Tensor):
            return InputError(f"{name} is a {type(tensor).__name__}: give a tensor")
        if tuple(tensor.shape) != shape:
            return InputError(f"{name} has shape {tuple(tensor.shape)}: expected {words} = {shape}")
        if not tensor.dtype.is_floating_point:
            return InputError(f"{name} is {tensor.dtype}: expected a float dtype")
        if tensor.device.type != spec.device.type:
            return InputError(f"{name} is on {tensor.device}, the layer on {spec.device}: move it")
    return None


def _too_many(
    spec: "LayerSpec", tokens: int, max_tokens: int | None, capturing: bool
) -> InputError | None:
    if max_tokens is not None and tokens > max_tokens:
        return CapacityError(
            f"T={tokens} tokens on this rank, the caller declared max_tokens={max_tokens} for every rank: declare more"
        )
    limit, most = spec.max_tokens_per_rank, max(tokens, max_tokens or 0)
    if most > limit and capturing:
        return CapacityError(
            f"{most} tokens in a CUDA graph capture, max_tokens_per_rank={limit}: a graph holds one round, "
            "build the layer larger"
        )
    return None  # whether C is enough is for all ranks to say together: see `rounds`


def bad_id(ids_TK: Tensor, experts: int) -> InputError | None:
    """An id that names no expert and is not -1, or None. Reads device values."""
    wrong = ids_TK[(ids_TK < -1) | (ids_TK >= experts)]
    if wrong.numel():
        return InputError(f"expert id {int(wrong[0])}: ids are 0 to {experts - 1}, or -1 for none")
    return None
