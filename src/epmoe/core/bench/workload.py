"""What a measurement computes: routing draws as router logits, tokens, and weights that fit on the device.

Everything follows from seeds, so any rank knows what any other one brings and can hold its rows against the oracle.

Legend: T tokens per rank, H hidden, I intermediate, E experts, K experts per token, EP ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.core.draws import draw
from epmoe.core.errors import InputError
from epmoe.core.placement import Placement
from epmoe.core.plan.load import Load, drawn_load
from epmoe.core.routing import route
from epmoe.core.shape import MoEShape
from epmoe.core.weights import ExpertWeights

# What logits can express; masked and duplicated ids cannot come out of a router.
ROUTINGS = ("uniform", "zipf", "hot_expert", "one_rank")
TUNING_SEED = 500_000  # tuning draws start here: never the ones that are reported


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What one source rank brings, on the device.

    Attributes:
        x_TH: [T, H] random normal, in the layer's dtype.
        logits_TE: [T, E] float32.
        ids_TK, weights_TK: what the reference router makes of the logits.
    """

    x_TH: Tensor
    logits_TE: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One routing of all EP source ranks. `sources[s]` is what rank s brings; `load` counts it exactly."""

    seed: int
    sources: tuple[Tokens, ...]
    bias_E: Tensor | None
    load: Load


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How draws are made: the `kind` (one of ROUTINGS) and, for zipf, its exponent."""

    kind: str = "uniform"
    skew: float = 1.0

    def __post_init__(self):
        if self.kind not in ROUTINGS:
            raise InputError(f"routing={self.kind!r}: choose one of {', '.join(ROUTINGS)}")
        if not math.isfinite(self.skew):
            raise InputError(f"skew={self.skew}: give a finite exponent, such as 1.0")
        if self.kind != "zipf" and self.skew != 1.0:
            raise InputError(f"skew={self.skew}: {self.kind} has no exponent, choose routing zipf")

    @classmethod
    def parse(cls, word: str) -> "Routing":
        """The routing that a word on the command line names: a kind, or zipf:EXPONENT."""
        kind, _, skew = word.partition(":")
        try:
            exponent = float(skew) if skew else 1.0
        except ValueError:
            raise InputError(
                f"routing={word!r}: give a number behind the colon, like zipf:1.0"
            ) from None
        return cls(kind=kind, skew=exponent)

    def __str__(self) -> str:
        return f"zipf:{self.skew}" if self.kind == "zipf" else self.kind


def make_draw(
    shape: MoEShape,
    placement: Placement,
    tokens: int,
    routing: Routing,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Draw:
    """The draw of that seed; equal on every rank."""
    bias_E = _bias(shape)
    sources = []
    for source in range(placement.ranks):
        own = (seed * 1009 + tokens) * 64 + source
        ids_TK, _ = draw(routing.kind, tokens, shape.topk, placement, own, routing.skew)
        logits_TE = logits_for(ids_TK, shape.experts, own)
        chosen_TK, weights_TK = route(logits_TE, shape.router, shape.topk, bias_E)
        generator = torch.Generator().manual_seed(own + 1)
        x_TH = torch.randn(tokens, shape.hidden, generator=generator)
        sources.append(
            Tokens(
                x_TH=x_TH.to(device, dtype),
                logits_TE=logits_TE.to(device),
                ids_TK=chosen_TK.to(device),
                weights_TK=weights_TK.to(device),
            )
        )
    load = drawn_load(shape, [tokens.ids_TK for tokens in sources], placement)
    on_device = None if bias_E is None else bias_E.to(device)
    return Draw(seed=seed, sources=tuple(sources), bias_E=on_device, load=load)


def logits_for(ids_TK: Tensor, experts: int, seed: int) -> Tensor:
    """Logits [T, E] float32 whose K largest of each row are `ids_TK`, clearly; a router with groups may choose others.

    Chosen experts lie in [1, 3), the others in (-3, -1]: no two routers disagree about the order because of rounding
    near the edge between chosen and not chosen.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, topk = ids_TK.shape
    logits_TE = -1 - 2 * torch.rand(tokens, experts, generator=generator)
    chosen_TK = 1 + 2 * torch.rand(tokens, topk, generator=generator)
    return logits_TE.scatter(1, ids_TK.long(), chosen_TK)


def _bias(shape: MoEShape) -> Tensor | None:
    """Sigmoid routers carry a correction bias; a small one, so that draws stay what they are."""
    if shape.router.scoring != "sigmoid":
        return None
    generator = torch.Generator().manual_seed(shape.experts)
    return 0.01 * torch.randn(shape.experts, generator=generator)


def fill_expert(
    w13_2IH: Tensor, w2_HI: Tensor, shape: MoEShape, seed: int, layer: int, expert: int
) -> None:
    """Random normal weights of one global expert, drawn on their own device: the same for every rank of one machine."""
    generator = torch.Generator(w13_2IH.device)
    generator.manual_seed((seed * 101 + layer) * 100_003 + expert)
    w13_2IH.normal_(0, shape.hidden**-0.5, generator=generator)
    w2_HI.normal_(0, shape.intermediate**-0.5, generator=generator)


def layer_weights(
    shape: MoEShape,
    experts: Sequence[int],
    seed: int,
    layer: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertWeights:
    """Weights of the named global experts in one layer of the chain, drawn on the device."""
    count, hidden, inner = len(experts), shape.hidden, shape.intermediate
    w13_E2IH = torch.empty(count, 2 * inner, hidden, dtype=dtype, device=device)
    w2_EHI = torch.empty(count, hidden, inner, dtype=dtype, device=device)
    for slot, expert in enumerate(experts):
        fill_expert(w13_E2IH[slot], w2_EHI[slot], shape, seed, layer, expert)
    return ExpertWeights(w13_E2IH, w2_EHI)
