"""The router: logits of one token over all experts become K expert ids and K float32 weights.

Two families cover today's models:

- softmax (Mixtral, Qwen3-MoE): probabilities over all experts, the K largest, renormalised or not;
- sigmoid with a correction bias (GLM-4.5, DeepSeek-V3): the bias steers WHICH experts are chosen and never enters
  the weights; optionally only experts of the best groups compete, a group scoring the sum of its two best.

Sources: Mixtral (arXiv:2401.04088), DeepSeek-V3 (arXiv:2412.19437, sections 2.1.2 and 2.1.3).
Legend: T tokens, H hidden, E experts, K experts per token, G groups.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from epmoe.core.ambient import no_autocast
from epmoe.core.errors import InputError
from epmoe.core.values import check_whole, is_whole


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How logits become ids and weights.

    Attributes:
        scoring: "softmax" over all experts, or an independent "sigmoid" per expert.
        renormalize: divide the K weights of a token by their sum.
        groups, topk_groups: experts form `groups` equal groups; only those of the best `topk_groups` compete.
        scale: multiplies the weights once, after renormalisation (routed_scaling_factor).

    Raises:
        InputError: a value that no router can have.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0

    def __post_init__(self):
        if self.scoring not in ("softmax", "sigmoid"):
            raise InputError(f"scoring={self.scoring!r}: choose 'softmax' or 'sigmoid'")
        check_whole("groups", self.groups, 1)
        check_whole("topk_groups", self.topk_groups, 1)
        if self.topk_groups > self.groups:
            raise InputError(
                f"topk_groups={self.topk_groups}: must be between 1 and groups={self.groups}"
            )
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not number or not math.isfinite(self.scale):
            raise InputError(f"scale={self.scale!r}: give a finite number, 1.0 to change nothing")

    def check(self, experts: int, topk: int) -> None:
        """Raise InputError where this router cannot serve `experts` and `topk`."""
        if not is_whole(topk) or not 1 <= topk <= experts:
            raise InputError(f"topk={topk!r}: must be between 1 and experts={experts}")
        if experts % self.groups:
            raise InputError(f"experts={experts} do not form groups={self.groups} equal groups")
        reachable = experts // self.groups * self.topk_groups
        if topk > reachable:
            raise InputError(
                f"topk={topk} is more than the {reachable} experts of {self.topk_groups} groups: raise topk_groups"
            )


def route(
    logits_TE: Tensor, config: RouterConfig, topk: int, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token.

    An expert ranks by its score plus its bias; under softmax without a bias by its logit, which orders as the score
    does but is not rounded. A group ranks by the sum of its two best scores, bias included. Of equals the lowest id
    comes first. A weight is the score alone.

    Three cases that a division would leave open: weights whose scores all underflow stay 0 when they are renormalised;
    an expert of score or bias -inf comes last, but still before every expert of a closed group; and a NaN among a
    token's logits, or in the bias, makes all K weights NaN, so that a broken gate is seen.

    Args:
        logits_TE: [T, E] of any float dtype; computed in float32.
        config: the router.
        topk: K.
        bias_E: [E] float32 correction bias, steers the choice only; None for none.

    Returns:
        topk_ids_TK [T, K] int32, best first, and topk_weights_TK [T, K] float32. A token depends on its own row alone.
        Ids are in range and different on any input.

    Raises:
        InputError: logits that are no matrix; a topk that is not from 1 to E, or more than the open groups hold;
            groups that E does not divide into.
    """
    if logits_TE.dim() != 2:
        raise InputError(f"logits have shape {tuple(logits_TE.shape)}: expected [tokens, experts]")
    config.check(logits_TE.shape[1], topk)
    logits_TE = logits_TE.float()
    scores_TE = _scores(logits_TE, config)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.float()
    rank_TE = logits_TE if bias_E is None and config.scoring == "softmax" else choice_TE
    if config.groups == 1:
        ids_TK = stable_topk(rank_TE, topk)
    else:
        open_TN = _experts_of_best_groups(choice_TE, config)
        ids_TK = open_TN.gather(1, stable_topk(rank_TE.gather(1, open_TN), topk))
    weights_TK = scores_TE.gather(1, ids_TK)
    if config.renormalize:
        # dim 1, never squeezed: with K = 1 every weight is exactly 1, whatever the other tokens are
        weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + _EPSILON)
    weights_TK = weights_TK.masked_fill(rank_TE.isnan().any(dim=1, keepdim=True), float("nan"))
    return ids_TK.to(torch.int32), weights_TK * config.scale


@dataclass(frozen=True, kw_only=True)
class Router:
    """Weights of a router and how they are used.

    Attributes:
        weight_EH: [E, H]; logits are computed in float32.
        bias_E: [E] float32 correction bias, or None.
        config, topk: how logits become ids and weights, and K.
    """

    weight_EH: Tensor
    config: RouterConfig
    topk: int
    bias_E: Tensor | None = None

    def __call__(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """topk_ids_TK int32 and topk_weights_TK float32 of x_TH [T, H]."""
        return route(self.logits(x_TH), self.config, self.topk, self.bias_E)

    def logits(self, x_TH: Tensor) -> Tensor:
        """logits_TE [T, E] float32."""
        with no_autocast(x_TH.device):
            return x_TH.float() @ self.weight_EH.float().T


def for_kernels(scores: Tensor) -> Tensor:
    """Logits or a bias as kernels read them: values of a row side by side, in a dtype of `_READ`, else float32."""
    scores = scores if scores.dtype in _READ else scores.float()
    return scores if scores.stride(-1) == 1 else scores.contiguous()


_READ = (torch.float32, torch.bfloat16, torch.float16)
_EPSILON = 1e-20  # below half a step of any sum that is not itself next to nothing


def _scores(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    return logits_TE.softmax(dim=1) if config.scoring == "softmax" else logits_TE.sigmoid()


def stable_topk(choice_TE: Tensor, topk: int) -> Tensor:
    """Ids of the K largest of every row, best first, the lowest id first among equals (torch.topk leaves ties open)."""
    order_TE = choice_TE.sort(dim=1, descending=True, stable=True).indices
    return order_TE[:, :topk]


def _experts_of_best_groups(choice_TE: Tensor, config: RouterConfig) -> Tensor:
    """[T, N] int64 ascending ids of the N experts that compete. A closed group leaves the race: a low score would not
    do, since an open expert's may be -inf."""
    size = choice_TE.shape[1] // config.groups
    choice_TGS = choice_TE.unflatten(1, (config.groups, size))
    group_score_TG = choice_TGS.topk(min(2, size), dim=2).values.sum(dim=2)
    best_TG = stable_topk(group_score_TG, config.topk_groups).sort(dim=1).values
    lanes_S = torch.arange(size, device=choice_TE.device)
    return (best_TG[:, :, None] * size + lanes_S).flatten(1)
