"""Send every assignment to its owner, exactly as many rows as there are.

What changes: instead of every token to every rank, one row per (token, expert) pair, to the owner rank alone.
Why: a rank computes and receives what its experts need, and nothing else.
When it wins: many ranks, long batches: then most tokens do not concern most ranks.
What it costs: how many rows go where is data, so the host must read it before it can post the exchange. It waits for
the device, nothing can be captured in a CUDA graph, and five exchanges run where two could do.

Legend: T tokens here, K experts per token, N = T * K assignments, S of them sent, R rows received, H hidden, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.core.capabilities import Capabilities
from epmoe.core.compose import compose
from epmoe.core.contract import Delivers
from epmoe.core.experts import EXPERTS
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.memory import LayerSize, Memory
from epmoe.core.numerics import sum_in_order
from epmoe.core.parts import ExchangePart
from epmoe.core.placement import KINDS
from epmoe.core.split import Exchange, Rows


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to go back: what `combine` needs to know of `dispatch`.

    Attributes:
        order_S: [S] the assignment (t * K + k) that each sent row carried.
        send_counts, recv_counts: rows to and from each rank, on the host.
        tokens, topk: T and K.
        dtype: of the tokens.
    """

    order_S: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    tokens: int
    topk: int
    dtype: torch.dtype


class VariableAllToAll(Exchange[Way]):
    """Exchange: counts first, then exactly the rows that are needed."""

    def __init__(self, spec: LayerSpec):
        self.group, self.tables = spec.group, spec.tables

    # --8<-- [start:dispatch]
    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> tuple[Rows, Way]:
        """Sort assignments by owner, tell every rank how many to expect, then send them. Needs no capacity."""
        tokens, topk = topk_ids_TK.shape
        ids_N = topk_ids_TK.flatten()
        owner_N = self.tables.owners_of(ids_N)  # EP, which is no rank, where an id names none
        send_counts, recv_counts = self._exchange_counts(owner_N)
        order_S = owner_N.argsort(stable=True)[
            : sum(send_counts)
        ]  # ids of -1 sort last and stay here
        way = Way(
            order_S=order_S,
            send_counts=send_counts,
            recv_counts=recv_counts,
            tokens=tokens,
            topk=topk,
            dtype=x_TH.dtype,
        )
        rows = Rows(
            x_RH=self._send(x_TH[order_S // topk], way),
            slots_RJ=self._send(self.tables.slot_E[ids_N[order_S].long()], way)[:, None],
            weights_RJ=self._send(topk_weights_TK.flatten()[order_S], way)[:, None],
        )
        return rows, way

    # --8<-- [end:dispatch]

    # --8<-- [start:counts]
    def _exchange_counts(self, owner_N: Tensor) -> tuple[list[int], list[int]]:
        """Rows to and from every rank. The host waits here: it cannot post an exchange of unknown size."""
        send = owner_N.new_zeros(self.group.size + 1, dtype=torch.int64)
        send.index_add_(0, owner_N, torch.ones_like(owner_N, dtype=torch.int64))
        send = send[:-1].contiguous()
        recv = torch.empty_like(send)
        self.group.all_to_all(recv, send)
        return send.tolist(), recv.tolist()  # two host syncs

    # --8<-- [end:counts]

    def _send(self, rows: Tensor, way: Way) -> Tensor:
        received = rows.new_empty((sum(way.recv_counts), *rows.shape[1:]))
        self.group.all_to_all(received, rows.contiguous(), way.recv_counts, way.send_counts)
        return received

    # --8<-- [start:combine]
    def combine(self, y_RH: Tensor, state: Way) -> Tensor:
        """Return every row to its token; add the K of a token first to last, in float32."""
        y_SH = y_RH.new_empty(sum(state.send_counts), y_RH.shape[1])
        self.group.all_to_all(y_SH, y_RH.contiguous(), state.send_counts, state.recv_counts)
        y_NH = y_RH.new_zeros(state.tokens * state.topk, y_RH.shape[1])
        y_NH[state.order_S] = y_SH
        y_TKH = y_NH.view(state.tokens, state.topk, y_RH.shape[1])
        return sum_in_order(y_TKH.unbind(dim=1)).to(state.dtype)

    # --8<-- [end:combine]


def _memory(size: LayerSize) -> Memory:
    """Worst: every assignment of all ranks comes here. Received rows, and what this rank sends, then gets back."""
    H, value, mine = size.shape.hidden, size.dtype.itemsize, size.capacity * size.shape.topk
    received = size.assignments * (H * value + 8)
    return Memory(kept=0, call=received + mine * (8 * H + 64) + size.capacity * H * 4)


EXCHANGE = ExchangePart(
    name="variable_a2a",
    summary="counts, host read-back, variable-split all-to-alls",
    capabilities=Capabilities(
        placements=KINDS, deterministic=True, batch_invariant=True, maskable=True
    ),
    delivers=Delivers(places="one", sizes="data", empty="never"),
    factory=lambda spec, workspace: VariableAllToAll(spec),
    memory=_memory,
)

STAGE = compose(EXCHANGE, EXPERTS, summary="counts, host read-back, variable-split all-to-alls")
