"""Give up exact sizes: every buffer has a fixed shape, so the host never has to know what the router decided.

What changes: row t of this rank goes to every rank d, always to send[d, t]; hidden values, expert slots, weights and a
valid flag travel bit-packed in one row; one all-to-all out, one back.
Why: no counts to exchange, nothing to read back, so the whole layer can be captured in a CUDA graph.
When it wins: decode, where launches and waiting cost more than bytes.
What it costs: every token goes to every rank (EP * C rows on the wire) whether it is needed there or not.

Legend: T tokens here, C capacity, EP ranks, R = EP * C rows, H hidden, K experts per token, E experts, B row bytes.
"""

import torch
from torch import Tensor

from epmoe.core.capabilities import Capabilities
from epmoe.core.contract import Delivers
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.memory import LayerSize, Memory
from epmoe.core.numerics import sum_in_order
from epmoe.core.packed_rows import PackedBuffers
from epmoe.core.parts import ExchangePart
from epmoe.core.placement import KINDS
from epmoe.core.split import Exchange, Rows
from epmoe.core.workspace import OPTION, Workspace


class FixedCapacity(Exchange[Tensor]):
    """Exchange: one all-to-all of packed rows out, one of float32 sums back."""

    def __init__(self, spec: LayerSpec, workspace: Workspace):
        self.group, self.buffers = spec.group, PackedBuffers(spec, workspace)
        self.layout = self.buffers.layout
        self.owner_E, self.slot_E = spec.tables.owner_E, spec.tables.slot_E
        self.ranks_D11 = torch.arange(self.group.size, device=spec.device)[:, None, None]

    # --8<-- [start:dispatch]
    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> tuple[Rows, Tensor]:
        """Pack, exchange, unpack. The state that leads home is x itself: its length and dtype."""
        send_DCB, recv_SCB, _ = self.buffers.of(capacity)
        self._pack(send_DCB, x_TH, topk_ids_TK, topk_weights_TK)
        self.group.all_to_all(
            recv_SCB, send_DCB
        )  # New: one exchange, of a size that everybody knows
        return self._unpack(recv_SCB.flatten(0, 1)), x_TH

    # --8<-- [end:dispatch]

    # --8<-- [start:pack]
    def _pack(
        self, send_DCB: Tensor, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> None:
        """send[d, t] = token t for rank d. Rows from T on keep what they held: their flag says that nobody looks."""
        tokens, layout = len(x_TH), self.layout
        layout.x(send_DCB)[:, :tokens] = x_TH
        layout.slots(send_DCB)[:, :tokens] = self._slots_on_every_rank(topk_ids_TK)
        layout.weights(send_DCB)[:, :tokens] = topk_weights_TK
        layout.valid(send_DCB)[:, :tokens] = 1
        layout.valid(send_DCB)[:, tokens:] = 0

    # --8<-- [end:pack]

    # --8<-- [start:slots]
    def _slots_on_every_rank(self, ids_TK: Tensor) -> Tensor:
        """slots_DTK int32: the place of each named expert on rank d, -1 where d does not own it."""
        real_TK = (ids_TK >= 0) & (ids_TK < len(self.owner_E))
        safe_TK = torch.where(real_TK, ids_TK, 0).long()
        on_rank_DTK = real_TK & (self.owner_E[safe_TK] == self.ranks_D11)
        return torch.where(on_rank_DTK, self.slot_E[safe_TK], -1)

    # --8<-- [end:slots]

    # --8<-- [start:unpack]
    def _unpack(self, recv_RB: Tensor) -> Rows:
        """Views of the received rows; only the slots are new, with those of padding rows taken out."""
        valid_R1 = self.layout.valid(recv_RB)[:, None] == 1
        return Rows(
            x_RH=self.layout.x(recv_RB),
            slots_RJ=torch.where(valid_R1, self.layout.slots(recv_RB), -1),
            weights_RJ=self.layout.weights(recv_RB),
        )

    # --8<-- [end:unpack]

    # --8<-- [start:combine]
    def combine(self, y_RH: Tensor, state: Tensor) -> Tensor:
        """One sum per (token, rank) comes home; ranks are added in ascending order, in float32."""
        _, _, home_DCH = self.buffers.of(len(y_RH) // self.group.size)
        self.group.all_to_all(home_DCH, y_RH.view_as(home_DCH))
        return sum_in_order(home_DCH[:, : len(state)].unbind(0)).to(state.dtype)

    # --8<-- [end:combine]


def _memory(size: LayerSize) -> Memory:
    """Send, receive and return buffers are kept; a call adds slots and the sum of what came home."""
    call = 32 * size.assignments + 4 * size.capacity * size.shape.hidden
    return Memory(PackedBuffers.nbytes(size), call)


EXCHANGE = ExchangePart(
    name="fixed_capacity",
    summary="one packed all-to-all out, one back, of a size that everybody knows",
    capabilities=Capabilities(
        transports=("single", "gloo", "nccl", "loopback"),
        placements=KINDS,
        graph_capturable=True,
        deterministic=True,
        batch_invariant=True,
        maskable=True,
    ),
    delivers=Delivers(places="topk", sizes="static", layout="strided"),
    factory=FixedCapacity,
    options=OPTION,
    overflow="rounds",
    memory=_memory,
)
