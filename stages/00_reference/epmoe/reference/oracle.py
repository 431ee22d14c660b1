"""The oracle: two nested loops over tokens and their experts, that nobody can doubt.

It shares no indexing with anything else: no sorting, no permutation, no placement, no ranks. It is what every layer on
every rank is held against.

Legend: T tokens, H hidden, I intermediate, E experts (all of them), K experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.core.weights import ExpertWeights


@dataclass(frozen=True)
class Answer:
    """What the layer must return, and the yardstick for how close it must come.

    Attributes:
        y_TH: [T, H], the exact sum.
        terms_T: [T], sum over k of |w_k| * max |f_k|: the size of what was added. Where large terms cancel, an error is
            small against the terms, not against the sum.
    """

    y_TH: Tensor
    terms_T: Tensor


# --8<-- [start:oracle]
def oracle(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    weights: ExpertWeights,
    dtype: torch.dtype = torch.float32,
) -> Answer:
    """Compute the layer token by token and expert by expert.

    Args:
        x_TH: [T, H], any float dtype.
        topk_ids_TK: [T, K] global ids; anything outside [0, E) is nothing.
        topk_weights_TK: [T, K].
        weights: of ALL experts, `weights.w2_EHI[e]` being global expert e.
        dtype: float32, or float64 on request.

    Returns:
        An `Answer` in `dtype`, on x's device.
    """
    y_TH = torch.zeros(x_TH.shape, dtype=dtype, device=x_TH.device)
    terms_T = torch.zeros(len(x_TH), dtype=dtype, device=x_TH.device)
    for t, (ids, gates) in enumerate(
        zip(topk_ids_TK.tolist(), topk_weights_TK.tolist(), strict=True)
    ):
        for expert, gate in zip(ids, gates, strict=True):
            if 0 <= expert < weights.experts:
                f_H = expert_output(x_TH[t].to(dtype), weights, expert)
                y_TH[t] += gate * f_H
                terms_T[t] += abs(gate) * f_H.abs().max()
    return Answer(y_TH, terms_T)


# --8<-- [end:oracle]


# --8<-- [start:expert]
def expert_output(x_H: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    """w2 @ (silu(gate @ x) * (up @ x)) of one token, in x's dtype."""
    gate_IH, up_IH = weights.w13_E2IH[expert].to(x_H.dtype).chunk(2)
    gate_I, up_I = gate_IH @ x_H, up_IH @ x_H
    return weights.w2_EHI[expert].to(x_H.dtype) @ (gate_I * torch.sigmoid(gate_I) * up_I)


# --8<-- [end:expert]
