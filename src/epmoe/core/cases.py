"""A case: what to build and what to call it with, all of it following from a few plain values.

Legend: T tokens, H hidden, K experts per token, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epmoe.core.draws import draw
from epmoe.core.errors import InputError
from epmoe.core.placement import NAMED, Placement, replicated
from epmoe.core.shape import MoEShape
from epmoe.core.weights import ExpertWeights, random_weights


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to build and what to call it with.

    Attributes:
        stage: a registered stage.
        shape: sizes of the layer.
        tokens: tokens[call][rank] is T; its width is the number of ranks.
        kind: the routing draw, see `epmoe.core.draws`.
        ids: ids[call][rank] are the rows of topk_ids, where a draw will not do; weights are drawn all the same.
        dtype, ids_dtype: of activations and weights, and of topk_ids.
        placement: one of `placement.NAMED`, the rank of every expert, several for an expert with replicas, or a map.
        gone: ranks that are masked before the first call, see `MoELayer.mask_ranks`.
        lost: what becomes of experts that nobody holds then, see `build`.
        seed: of weights, tokens and routing.
        capacity: max_tokens_per_rank; None for the most that a call brings.
        overflow: what a call with more does, see `build`; None for the stage's default.
        declared: tell every call how many tokens the fullest rank brings (`max_tokens=`).
        strided: x, ids, weights and expert weights are views with gaps or transposed, the gaps full of NaN.
        check: the layer's checked mode. It reads ids, which the ledger counts.
        poison: fill fresh memory with NaN during the calls.
        rows: compare at most so many rows of a call, evenly spread; None for all.
        options: the stage's own.
    """

    stage: str
    shape: MoEShape
    tokens: tuple[tuple[int, ...], ...]
    kind: str = "uniform"
    ids: Sequence[Sequence[Sequence[Sequence[int]]]] | None = None
    dtype: torch.dtype = torch.float32
    ids_dtype: torch.dtype = torch.int32
    placement: str | tuple[int | tuple[int, ...], ...] | Placement = "contiguous"
    gone: tuple[int, ...] = ()
    lost: str = "drop"
    seed: int = 0
    capacity: int | None = None
    overflow: str | None = None
    declared: bool = False
    strided: bool = False
    check: bool = False
    poison: bool = True
    rows: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        widths = {len(call) for call in self.tokens}
        if len(widths) != 1:
            raise InputError(
                f"tokens={self.tokens}: give one T per rank in every call, at least one call"
            )
        self.placed()

    @property
    def ranks(self) -> int:
        """EP, the group's size that this case needs."""
        return len(self.tokens[0])

    @property
    def max_tokens_per_rank(self) -> int:
        return self.capacity or max(1, *map(max, self.tokens))

    def max_tokens(self, call: int) -> int | None:
        """What the caller declares of `call`."""
        return max(self.tokens[call]) if self.declared else None

    def placed(self) -> Placement:
        """The expert map."""
        if isinstance(self.placement, Placement):
            return self.placement
        if isinstance(self.placement, str):
            if self.placement not in NAMED:
                names = ", ".join(NAMED)
                raise InputError(
                    f"placement={self.placement!r}: give {names}, the rank of every expert or a map"
                )
            return NAMED[self.placement](self.shape.experts, self.ranks)
        homes = [held if isinstance(held, tuple) else (held,) for held in self.placement]
        return replicated(homes, self.ranks)

    def routing(self, call: int, rank: int) -> tuple[Tensor, Tensor]:
        """topk_ids_TK and topk_weights_TK that `rank` brings to `call`, on the CPU."""
        seed = self._seed(call, rank)
        tokens = self.tokens[call][rank]
        ids_TK, weights_TK = draw(self.kind, tokens, self.shape.topk, self.placed(), seed)
        if self.ids is not None:
            ids_TK = torch.tensor(self.ids[call][rank], dtype=torch.int64).reshape(ids_TK.shape)
        return ids_TK.to(self.ids_dtype), weights_TK

    def what_is_left(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """A routing as the oracle is asked for it: without what the ranks that are gone have taken away."""
        ids_TK, weights_TK = ids_TK.clone(), weights_TK.clone()
        homes, gone = self.placed().homes, set(self.gone)
        for ids_K, weights_K in zip(ids_TK, weights_TK, strict=True):
            named = [k for k, e in enumerate(ids_K.tolist()) if 0 <= e < len(homes)]
            left = [k for k in named if not gone.issuperset(homes[int(ids_K[k])])]
            ids_K[[k for k in named if k not in left]] = -1
            if self.lost == "renormalise" and left:
                weights_K[left] *= sum(weights_K[named].tolist()) / sum(weights_K[left].tolist())
        return ids_TK, weights_TK

    def tokens_of(self, call: int, rank: int) -> Tensor:
        """x_TH that `rank` brings to `call`, on the CPU, in the case's dtype."""
        generator = torch.Generator().manual_seed(self._seed(call, rank) + 1)
        tokens = self.tokens[call][rank]
        return torch.randn(tokens, self.shape.hidden, generator=generator, dtype=torch.float32).to(
            self.dtype
        )

    def weights_of(self, experts: Sequence[int]) -> ExpertWeights:
        """Weights of global experts, on the CPU; expert e's down projection is scaled by e + 1."""
        return random_weights(self.shape, experts, self.dtype, seed=self.seed, distinct=True)

    def rows_needed(self, call: int, rank: int) -> int:
        """Assignments of all ranks that `rank` has to serve."""
        needed = 0
        for source in range(self.ranks):
            owners_E = torch.tensor(self.placed().owners_from(source, self.gone))
            ids_TK = self.routing(call, source)[0]
            real_N = ids_TK[(ids_TK >= 0) & (ids_TK < self.shape.experts)].long()
            needed += int((owners_E[real_N] == rank).sum())
        return needed

    def _seed(self, call: int, rank: int) -> int:
        return ((self.seed * 1009 + call) * 64 + rank) * 2
