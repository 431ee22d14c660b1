"""A case: what to build and what to call it with, all of it following from a few plain values.

Legend: T tokens, H hidden, K experts per token, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epmoe.core.draws import draw
from epmoe.core.errors import InputError
from epmoe.core.placement import Placement, contiguous, explicit, round_robin
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
        placement: "contiguous", "round_robin" or the owner rank of every expert.
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
    placement: str | tuple[int, ...] = "contiguous"
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
        if self.placement == "contiguous":
            return contiguous(self.shape.experts, self.ranks)
        if self.placement == "round_robin":
            return round_robin(self.shape.experts, self.ranks)
        if isinstance(self.placement, str):
            raise InputError(
                f"placement={self.placement!r}: give contiguous, round_robin or a list of owners"
            )
        return explicit(self.placement, self.ranks)

    def routing(self, call: int, rank: int) -> tuple[Tensor, Tensor]:
        """topk_ids_TK and topk_weights_TK that `rank` brings to `call`, on the CPU."""
        seed = self._seed(call, rank)
        tokens = self.tokens[call][rank]
        ids_TK, weights_TK = draw(self.kind, tokens, self.shape.topk, self.placed(), seed)
        if self.ids is not None:
            ids_TK = torch.tensor(self.ids[call][rank], dtype=torch.int64).reshape(ids_TK.shape)
        return ids_TK.to(self.ids_dtype), weights_TK

    def tokens_of(self, call: int, rank: int) -> Tensor:
        """x_TH that `rank` brings to `call`, on the CPU, in the case's dtype."""
        generator = torch.Generator().manual_seed(self._seed(call, rank) + 1)
        tokens = self.tokens[call][rank]
        return torch.randn(tokens, self.shape.hidden, generator=generator).to(self.dtype)

    def weights_of(self, experts: Sequence[int]) -> ExpertWeights:
        """Weights of global experts, on the CPU; expert e's down projection is scaled by e + 1."""
        return random_weights(self.shape, experts, self.dtype, seed=self.seed, distinct=True)

    def rows_needed(self, call: int, rank: int) -> int:
        """Assignments of all ranks whose expert lives on `rank`."""
        owners_E = self.placed().owner_table()
        needed = 0
        for source in range(self.ranks):
            ids_TK = self.routing(call, source)[0]
            real_N = ids_TK[(ids_TK >= 0) & (ids_TK < self.shape.experts)].long()
            needed += int((owners_E[real_N] == rank).sum())
        return needed

    def _seed(self, call: int, rank: int) -> int:
        return ((self.seed * 1009 + call) * 64 + rank) * 2
