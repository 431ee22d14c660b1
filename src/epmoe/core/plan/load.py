"""What a routing asks of every rank: tokens, assignments, active experts, rows that have to travel.

Either counted from a draw (exact), or in expectation under uniform routing: each token names K different experts, every
set of K equally likely, tokens independent of one another.

Worked on the toy (4 experts on 2 ranks, contiguous; 2 tokens a rank; K = 2):

    rank 0 sends tokens that name (0, 1) and (1, 2); rank 1 tokens that name (2, 3) and (0, 3)
    assignments  4 on rank 0 (experts 0 1 1 0), 4 on rank 1 (2 2 3 3)
    active       2 on rank 0 (experts 0 and 1), 2 on rank 1 (2 and 3)
    hit rows     0 -> 1: one (the token that names 2); 1 -> 0: one (the token that names 0)

In expectation: a token misses a rank with C(2, 2) / C(4, 2) = 1/6; an expert stays idle with (1 - 2/4)^4 = 1/16.

Legend: T tokens of a rank, E experts, E_local experts of a rank, K experts per token, EP ranks, S source rank, D
owner rank.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from epmoe.core.errors import InputError
from epmoe.core.placement import Placement, contiguous
from epmoe.core.routing_stats import count_draw
from epmoe.core.shape import MoEShape
from epmoe.core.values import check_whole

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one routing asks; counts are whole for a draw and fractions in expectation.

    Attributes:
        tokens: T of every rank.
        active: experts with at least one assignment, of every rank.
        slots_SD: assignments of source rank s that belong to owner rank d, [EP][EP].
        hits_SD: tokens of source rank s that name at least one expert of rank d, [EP][EP].
        exact: True where counted from a draw.
    """

    tokens: tuple[int, ...]
    active: tuple[float, ...]
    slots_SD: Matrix
    hits_SD: Matrix
    exact: bool

    @cached_property  # asked for rank by rank
    def assignments(self) -> tuple[float, ...]:
        """(token, expert) pairs that every owner rank computes."""
        return tuple(sum(column) for column in zip(*self.slots_SD, strict=True))

    @cached_property
    def hit_tokens(self) -> tuple[float, ...]:
        """Tokens of all ranks that name at least one expert of a rank, per owner rank."""
        return tuple(sum(column) for column in zip(*self.hits_SD, strict=True))


def expected_active(
    shape: MoEShape,
    ep: int,
    tokens_per_rank: int | Sequence[int],
    placement: Placement | None = None,
) -> tuple[float, ...]:
    """Active experts of every rank, in expectation under uniform routing.

    One token misses an expert with probability 1 - K/E (its K experts are drawn without replacement), so that all
    S = EP x T tokens leave it idle with (1 - K/E)^S, and rank d has E_local x (1 - (1 - K/E)^S) active ones. A replica
    counts the tokens of the ranks that it serves.
    """
    placement = resolve_placement(shape, ep, placement)
    per_rank = resolve_tokens(ep, tokens_per_rank)
    served = [[0] * (ep + 1) for _ in range(shape.experts)]  # tokens that ask rank d for expert e
    for source, tokens in enumerate(per_rank):
        for asked, owner in zip(served, placement.owners_from(source), strict=True):
            asked[owner] += tokens
    return tuple(_expected_busy(shape, [asked[d] for asked in served]) for d in range(ep))


def _expected_busy(shape: MoEShape, tokens_E: Sequence[int]) -> float:
    """How many experts are named at least once, when tokens_E[e] tokens could name expert e."""
    miss = 1.0 - shape.topk / shape.experts
    return sum(n * (1.0 - miss**tokens) for tokens, n in Counter(tokens_E).items())


def hit_probability(shape: MoEShape, local_experts: int) -> float:
    """Probability that a token names at least one of `local_experts` given experts: 1 - C(E - n, K) / C(E, K)."""
    if not 0 <= local_experts <= shape.experts:
        raise InputError(f"local_experts={local_experts}: must be between 0 and E={shape.experts}")
    misses = math.comb(shape.experts - local_experts, shape.topk)
    return 1.0 - misses / math.comb(shape.experts, shape.topk)


def expected_load(
    shape: MoEShape, ep: int, tokens: int | Sequence[int], placement: Placement | None = None
) -> Load:
    """The load in expectation under uniform routing (a router with expert groups hits fewer ranks than this)."""
    return _expected(
        shape, ep, tuple(resolve_tokens(ep, tokens)), resolve_placement(shape, ep, placement)
    )


@lru_cache(maxsize=64)  # the same for every dtype and GPU that somebody asks about
def _expected(shape: MoEShape, ep: int, per_rank: tuple[int, ...], placement: Placement) -> Load:
    owners_SE = [Counter(placement.owners_from(source)) for source in range(ep)]
    serving_SD = [[owners[rank] for rank in range(ep)] for owners in owners_SE]
    hit = {n: hit_probability(shape, n) for n in set().union(*serving_SD)}
    return Load(
        tokens=per_rank,
        active=expected_active(shape, ep, per_rank, placement),
        slots_SD=tuple(
            tuple(t * (shape.topk * n / shape.experts) for n in serving)
            for t, serving in zip(per_rank, serving_SD, strict=True)
        ),
        hits_SD=tuple(
            tuple(t * hit[n] for n in serving)
            for t, serving in zip(per_rank, serving_SD, strict=True)
        ),
        exact=False,
    )


def drawn_load(
    shape: MoEShape, topk_ids: Sequence[Tensor], placement: Placement | None = None
) -> Load:
    """The load of one draw, counted: topk_ids[s] is the [T, K] ids of source rank s, -1 for no expert.

    An expert named twice in one token is two assignments and one hit.
    """
    placement = resolve_placement(shape, len(topk_ids), placement)
    for source, ids_TK in enumerate(topk_ids):
        _check_ids(ids_TK, shape.experts)
        if ids_TK.shape[1] != shape.topk:
            raise InputError(
                f"rank {source} names {ids_TK.shape[1]} experts per token: the shape has topk={shape.topk}"
            )
    counted = count_draw(topk_ids, placement)
    return Load(
        tokens=counted.tokens,
        active=counted.active,
        slots_SD=counted.slots_SD,
        hits_SD=counted.hits_SD,
        exact=True,
    )


def resolve_placement(shape: MoEShape, ep: int, placement: Placement | None) -> Placement:
    """The given placement, or the contiguous one; InputError where it does not fit the shape and the ranks."""
    check_whole("ep", ep, 1)
    placement = placement or contiguous(shape.experts, ep)
    if placement.experts != shape.experts or placement.ranks != ep:
        raise InputError(
            f"the placement holds {placement.experts} experts on {placement.ranks} ranks: "
            f"the shape has {shape.experts} experts and ep={ep}"
        )
    return placement


def resolve_tokens(ep: int, tokens: int | Sequence[int]) -> tuple[int, ...]:
    """T of every rank, from one number for all or one per rank; InputError for a negative or missing one."""
    per_rank = tuple(tokens) if isinstance(tokens, Sequence) else (tokens,) * ep
    if len(per_rank) != ep:
        raise InputError(
            f"tokens={list(per_rank)} names {len(per_rank)} ranks: ep={ep} needs one number or {ep} of them"
        )
    for rank, count in enumerate(per_rank):
        check_whole(f"tokens[{rank}]", count, 0)
    return per_rank


def _check_ids(ids_TK: Tensor, experts: int) -> None:
    if ids_TK.dim() != 2 or ids_TK.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"topk_ids are {ids_TK.dtype} of shape {tuple(ids_TK.shape)}: expected int32 or int64 [tokens, K]"
        )
    if not ids_TK.numel():
        return
    low, high = int(ids_TK.min()), int(ids_TK.max())
    if low < -1 or high >= experts:
        bad = low if low < -1 else high
        raise InputError(f"topk_ids hold {bad}: ids are 0 to {experts - 1}, or -1 for no expert")
