"""Send a token once to every rank that needs it, however many of its experts live there.

What changes: `variable_a2a` sends a row for every (token, expert) pair; here all experts of one rank share a row.
Why: K experts live on at most min(K, EP) ranks, and the owner can add up what they answer: one row comes home, too.
When it wins: K above EP, or routing that keeps a token's experts together (node-limited routing of DeepSeek-V3).
What it costs: as there, how many rows travel is data, so the host has to read it; and every row carries K slots.

Source of the idea: DeepEP's `is_token_in_rank`, https://github.com/deepseek-ai/DeepEP.

Legend: T tokens here, K experts per token, D destination ranks, S sent rows, R received rows, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.core.capabilities import Capabilities
from epmoe.core.contract import Delivers
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.parts import ExchangePart
from epmoe.core.placement import KINDS
from epmoe.core.split import Exchange, Rows


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to go back: the token of each sent row, rows to and from each rank, and the tokens' number and dtype."""

    token_S: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    tokens: int
    dtype: torch.dtype


class OncePerRank(Exchange[Way]):
    """Exchange: counts first, then one row for each (rank, token) that have to do with each other."""

    def __init__(self, spec: LayerSpec):
        self.group, self.tables = spec.group, spec.tables
        self.ranks_D = torch.arange(spec.group.size, device=spec.device)

    # --8<-- [start:dispatch]
    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> tuple[Rows, Way]:
        """A rank gets the whole token and all K weights; slots of other ranks' experts are -1 there."""
        owner_TK = self.tables.owners_of(topk_ids_TK)  # EP, which is no rank, where an id is none
        needed_DT = (owner_TK == self.ranks_D[:, None, None]).any(dim=2)
        send_counts, recv_counts = self._exchange_counts(needed_DT)
        rank_S, token_S = needed_DT.nonzero().unbind(dim=1)  # rank by rank; a host sync
        way = Way(
            token_S=token_S,
            send_counts=send_counts,
            recv_counts=recv_counts,
            tokens=len(x_TH),
            dtype=x_TH.dtype,
        )
        elsewhere_SK = owner_TK[token_S] != rank_S[:, None]
        slot_SK = self.tables.slots_of(topk_ids_TK)[token_S].masked_fill(elsewhere_SK, -1)
        rows = Rows(
            x_RH=self._send(x_TH[token_S], way),
            slots_RJ=self._send(slot_SK, way),
            weights_RJ=self._send(topk_weights_TK[token_S], way),
        )
        return rows, way

    # --8<-- [end:dispatch]

    def _exchange_counts(self, needed_DT: Tensor) -> tuple[list[int], list[int]]:
        send = needed_DT.sum(dim=1)
        recv = torch.empty_like(send)
        self.group.all_to_all(recv, send)
        return send.tolist(), recv.tolist()  # two host syncs

    def _send(self, rows: Tensor, way: Way) -> Tensor:
        received = rows.new_empty((sum(way.recv_counts), *rows.shape[1:]))
        self.group.all_to_all(received, rows.contiguous(), way.recv_counts, way.send_counts)
        return received

    # --8<-- [start:combine]
    def combine(self, y_RH: Tensor, state: Way) -> Tensor:
        """Add what the ranks owe each token, rank by rank, in float32: the order never changes."""
        y_SH = y_RH.new_empty(sum(state.send_counts), y_RH.shape[1])
        self.group.all_to_all(y_SH, y_RH, state.send_counts, state.recv_counts)
        y_TH = y_RH.new_zeros(state.tokens, y_RH.shape[1])
        blocks = y_SH.split(state.send_counts), state.token_S.split(state.send_counts)
        for y_MH, token_M in zip(*blocks, strict=True):
            y_TH[token_M] += y_MH  # a token occurs once in a block, so no two rows meet
        return y_TH.to(state.dtype)

    # --8<-- [end:combine]


# --8<-- [start:part]
EXCHANGE = ExchangePart(
    name="once_per_rank",
    summary="counts, then a token once to every rank that needs it",
    capabilities=Capabilities(
        placements=KINDS, deterministic=True, batch_invariant=True, maskable=True
    ),
    delivers=Delivers(places="topk", sizes="data"),
    factory=lambda spec, workspace: OncePerRank(spec),
)
# --8<-- [end:part]
