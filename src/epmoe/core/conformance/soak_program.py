"""Many replays of one captured call, each with fresh tokens and fresh routing, each held against a dense computation.

The oracle's Python loops would take hours here, so every token goes through EVERY expert in a few einsums, and the
routing only picks: no sorting, no exchange, nothing that a stage does.

Legend: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.core.cases import Case
from epmoe.core.draws import KINDS, draw
from epmoe.core.graphs import GraphedCall
from epmoe.core.groups import EPGroup
from epmoe.core.verify import build_case, differ, relative_error
from epmoe.core.weights import ExpertWeights

EAGER_EVERY = 20  # so often a replay is compared with an eager call, bit for bit


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What one rank saw: replays, the largest error relative to the terms, replays that differ from an eager call."""

    replays: int
    error: float
    unlike_eager: int


def soak(group: EPGroup, case: Case, replays: int) -> Soak:
    """Capture once, replay `replays` times; T changes with every replay, and each rank is idle at times. Collective."""
    layer = build_case(group, case)
    capacity, everything = case.max_tokens_per_rank, case.weights_of(range(case.shape.experts))
    everything = everything.to(group.device, torch.float32)
    graph, worst, unlike = GraphedCall(layer, capacity), 0.0, 0
    for turn in range(replays):
        arguments = _fresh(group, case, turn, capacity)
        y_TH = graph(*arguments)
        worst = max(worst, _error(y_TH, arguments, everything))
        if turn % EAGER_EVERY == 0:
            unlike += differ(y_TH, layer(*arguments, max_tokens=capacity))
    graph.close()
    layer.close()
    return Soak(replays=replays, error=worst, unlike_eager=unlike)


def _fresh(group: EPGroup, case: Case, turn: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = (turn * (group.rank + 3) + group.rank) % (capacity + 1)
    seed = turn * group.size + group.rank
    kind = KINDS[turn % len(KINDS)]
    ids_TK, weights_TK = draw(
        kind, tokens, case.shape.topk, case.placed(), seed, device=group.device
    )
    generator = torch.Generator(group.device).manual_seed(seed)
    x_TH = torch.randn(tokens, case.shape.hidden, generator=generator, device=group.device)
    return x_TH.to(case.dtype), ids_TK, weights_TK


def _error(
    y_TH: Tensor, arguments: tuple[Tensor, Tensor, Tensor], everything: ExpertWeights
) -> float:
    x_TH, ids_TK, weights_TK = arguments
    gate_TEI, up_TEI = torch.einsum("nh,eih->nei", x_TH.float(), everything.w13_E2IH).chunk(2, 2)
    f_TEH = torch.einsum("nei,ehi->neh", F.silu(gate_TEI) * up_TEI, everything.w2_EHI)
    picked_TKH = f_TEH.gather(
        1, ids_TK.clamp(min=0).long()[:, :, None].expand(-1, -1, f_TEH.shape[2])
    )
    weight_TK1 = torch.where(ids_TK >= 0, weights_TK, 0.0)[:, :, None]
    terms_T = (weight_TK1.abs() * picked_TKH.abs().amax(2, keepdim=True)).sum(dim=(1, 2))
    error_T = relative_error(y_TH, (weight_TK1 * picked_TKH).sum(1), terms_T)
    return max(error_T.tolist(), default=0.0)
