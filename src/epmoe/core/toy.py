"""The one small routing that pages, pictures, tests and kernel docstrings all work through.

2 ranks, 4 experts, 4 tokens, K = 2, contiguous: rank 0 owns experts 0 and 1, rank 1 owns 2 and 3. Every token weighs
its first expert 0.75 and its second 0.25:

    rank 0: token 0 names (0, 1), token 1 names (1, 2)
    rank 1: token 2 names (2, 3), token 3 names (0, 3)

Token t is the row t, t + 0.1, t + 0.2, t + 0.3, so that a row shows which token it is wherever it lies.
Legend: T tokens of a rank, H hidden, K experts per token, E experts, R received rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.groups import EPGroup
from epmoe.core.layer import build
from epmoe.core.placement import Placement, contiguous
from epmoe.core.shape import SHAPES, MoEShape
from epmoe.core.split import Rows, SplitLayer
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.reference.oracle import oracle


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A routing as plain data.

    Attributes:
        shape, placement: sizes of the layer and its expert map.
        ids: ids[rank][token of that rank] is the K experts that it names.
        gates: the K routing weights of every token.
    """

    shape: MoEShape
    placement: Placement
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    gates: tuple[float, ...]

    @property
    def ranks(self) -> int:
        """EP."""
        return len(self.ids)

    @property
    def capacity(self) -> int:
        """C: the tokens of the fullest rank."""
        return max(len(tokens) for tokens in self.ids)

    def tokens_of(self, rank: int) -> range:
        """Numbers of this rank's tokens; they count on from rank to rank."""
        first = sum(len(tokens) for tokens in self.ids[:rank])
        return range(first, first + len(self.ids[rank]))

    def named_by(self, token: int) -> tuple[int, ...]:
        """The K experts of a token."""
        return [ids for tokens in self.ids for ids in tokens][token]

    def x_TH(self, rank: int) -> Tensor:
        """[T, H] float32: token t is t + 0.1 h."""
        columns = torch.arange(self.shape.hidden) * 0.1
        return torch.tensor(self.tokens_of(rank))[:, None] + columns

    def ids_TK(self, rank: int) -> Tensor:
        """[T, K] int32."""
        return torch.tensor(self.ids[rank], dtype=torch.int32)

    def gates_TK(self, rank: int) -> Tensor:
        """[T, K] float32."""
        return torch.tensor(self.gates).repeat(len(self.ids[rank]), 1)

    def weights(self, rank: int | None = None) -> ExpertWeights:
        """Weights of one rank's experts, or of all; expert e's down projection is scaled by e + 1."""
        experts = range(self.placement.experts) if rank is None else self.placement.experts_of(rank)
        return random_weights(self.shape, experts)


TOY = Toy(
    shape=SHAPES["toy"],
    placement=contiguous(4, 2),
    ids=(((0, 1), (1, 2)), ((2, 3), (0, 3))),
    gates=(0.75, 0.25),
)


@dataclass(frozen=True, kw_only=True)
class ToyCall:
    """What a stage did with the toy on one rank.

    Attributes:
        rank: which.
        y_TH, wanted_TH: the layer's result and the oracle's.
        rows: what dispatch delivered to this rank's experts; None for a layer that is not split.
        ledger: of one call, see `Ledger.summary`.
        collectives: every exchange as (name, bytes that left this rank).
    """

    rank: int
    y_TH: Tensor
    wanted_TH: Tensor
    rows: Rows | None
    ledger: dict
    collectives: list[tuple[str, int]]

    @property
    def worst(self) -> float:
        """The largest difference from the oracle."""
        return float((self.y_TH - self.wanted_TH).abs().max())

    def received(self) -> list[tuple[int, tuple[int, ...]]]:
        """Every received row as (token, local slots), read off the rows themselves."""
        assert self.rows is not None, "this layer is not split: it has no rows to show"
        tokens = self.rows.x_RH[:, 0].round().int().tolist()
        slots = (tuple(row) for row in self.rows.slots_RJ.tolist())
        return list(zip(tokens, slots, strict=True))


def call_toy(group: EPGroup, stage: str, toy: Toy = TOY) -> ToyCall:
    """Run `stage` on the toy; a rank program for `launch` and `RankPool.run`, on as many ranks as the toy has."""
    rank = group.rank
    weights = toy.weights(rank).to(group.device)
    layer = build(stage, toy.shape, weights, toy.placement, group, toy.capacity)
    x_TH, ids_TK = toy.x_TH(rank).to(group.device), toy.ids_TK(rank).to(group.device)
    gates_TK = toy.gates_TK(rank).to(group.device)
    with ledger.record() as book:
        y_TH = layer(x_TH, ids_TK, gates_TK)
    rows = None
    if isinstance(layer, SplitLayer):  # once more, stopped halfway: both halves are collective
        rows, state = layer.exchange.dispatch(x_TH, ids_TK, gates_TK, toy.capacity)
        rows = rows.clone()  # before combine, which may write where they lie
        layer.exchange.combine(layer.experts(rows), state)
    layer.close()
    answer = oracle(toy.x_TH(rank), toy.ids_TK(rank), toy.gates_TK(rank), toy.weights())
    return ToyCall(
        rank=rank,
        y_TH=y_TH.cpu(),
        wanted_TH=answer.y_TH,
        rows=rows,
        ledger=book.summary(),
        collectives=[(c.name, c.wire_bytes) for c in book.collectives],
    )
