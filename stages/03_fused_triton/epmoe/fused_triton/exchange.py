"""The exchange of the stage before, with one kernel on each side of each all-to-all.

Legend: T tokens here, C capacity, EP ranks, R = EP * C rows, H hidden, K experts per token, E experts, B row bytes.
"""

import torch
from torch import Tensor

from epmoe.core.layer_spec import LayerSpec
from epmoe.core.packed_rows import PackedBuffers
from epmoe.core.split import RoutingExchange, Rows
from epmoe.core.workspace import Workspace
from epmoe.fused_triton import fusions, kernels, twins


class FusedExchange(RoutingExchange[Tensor]):
    """Pack in one kernel (routing on the way, if asked), merge in one kernel; two all-to-alls as before."""

    def __init__(self, spec: LayerSpec, workspace: Workspace):
        self.group, self.fusions = spec.group, fusions.of(spec)
        self.pdl = "overlap" in self.fusions and kernels.pdl_supported(spec.device)
        self.buffers = PackedBuffers(spec, workspace)
        self.layout = self.buffers.layout
        self.rule = spec.shape.router
        self.ring = bool(spec.options.get("ring"))
        self.owner_E, self.slot_E = spec.tables.owner_E, spec.tables.slot_E

    # --8<-- [start:dispatch]
    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> tuple[Rows, Tensor]:
        """Pack and exchange. The state that leads home is x itself: its length and dtype."""
        send_DCB, recv_SCB, _ = self.buffers.of(capacity)
        routing = (topk_ids_TK.contiguous(), topk_weights_TK.contiguous())
        if "pack" in self.fusions:
            self._pack(send_DCB, x_TH, *routing)
        else:
            twins.pack(self, send_DCB, x_TH, *routing)
        self.group.all_to_all(recv_SCB, send_DCB)
        return self.layout.unpack(recv_SCB), x_TH  # views: the kernels read packed rows in place

    # --8<-- [end:dispatch]

    @property
    def routes(self) -> bool:
        """Whether the pack kernel routes: both fusions are on."""
        return {"router", "pack"} <= self.fusions

    def route_and_dispatch(
        self,
        x_TH: Tensor,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        capacity: int,
    ) -> tuple[Rows, Tensor]:
        """As `dispatch`; the pack kernel chooses the experts of each token itself."""
        send_DCB, recv_SCB, _ = self.buffers.of(capacity)
        self._pack(send_DCB, x_TH, topk_ids_TK, topk_weights_TK, logits_TE, bias_E)
        self.group.all_to_all(recv_SCB, send_DCB)
        return self.layout.unpack(recv_SCB), x_TH

    def _pack(
        self,
        send_DCB: Tensor,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        logits_TE: Tensor | None = None,
        bias_E: Tensor | None = None,
    ) -> None:
        x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
        kernels.route_and_pack(
            x_TH, self.owner_E, self.slot_E, send_DCB, ids_TK, weights_TK,
            logits_TE=logits_TE, bias_E=bias_E, rule=self.rule, pdl=self.pdl,
        )  # fmt: skip

    # --8<-- [start:combine]
    def combine(self, y_RH: Tensor, state: Tensor) -> Tensor:
        """One float32 sum per (token, rank) comes home; one kernel adds ranks in ascending order."""
        _, _, home_DCH = self.buffers.of(len(y_RH) // self.group.size)
        self.group.all_to_all(home_DCH, y_RH.view_as(home_DCH))
        y_TH = torch.empty(state.shape, dtype=state.dtype, device=state.device)
        if "merge" in self.fusions:
            kernels.merge_ranks(home_DCH, y_TH, ring=self.ring, pdl=self.pdl)
        else:
            twins.merge_ranks(home_DCH, y_TH, ring=self.ring)
        return y_TH

    # --8<-- [end:combine]

    def describe(self) -> dict[str, object]:
        """The fusions that are on in this layer."""
        return {"fusions": sorted(self.fusions)}
