"""Experts as four kernels over the received rows: group, gate-up, down, reduce.

Legend: R received rows, J places of a row, N = R * J assignments, H hidden, I intermediate, E_local experts here.
"""

import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.contract import Delivers
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.split import Experts, Rows
from epmoe.core.workspace import Workspace
from epmoe.fused_triton import fusions, kernels, twins, work_list
from epmoe.fused_triton.tuning import Choice, Tuning


class TritonExperts(Experts):
    """Grouped products with gathered rows; tiles come from a list that the GPU wrote.

    Weighed expert outputs are kept in float32 until they are added; only where tiles are those of a long prefill, which
    is bound by what it moves, in the layer's dtype (rounded once, after the weight). With the option `batch_invariant`
    they are float32 always, and one tile size serves all calls.
    """

    def __init__(self, spec: LayerSpec, workspace: Workspace, delivers: Delivers):
        self.weights, self.workspace, self.spec = spec.weights, workspace, spec
        self.static = delivers.sizes == "static"
        # of rows that everybody gets, one in EP is likely to be for this rank; any number is right
        self.ranks = spec.group.size if self.static else 1
        self.fusions = fusions.of(spec)
        self.pdl = "overlap" in self.fusions and kernels.pdl_supported(spec.device)
        self.exact = bool(spec.options.get("batch_invariant", False))
        self.tuning = Tuning.of(spec, self.exact)
        self._most = spec.group.size * spec.max_tokens_per_rank * spec.shape.topk
        self._most_experts = max(spec.placement.counts())  # the same buffer on every rank
        # buffers are made now, outside of any graph capture
        self._work_list(self._most, tile_rows=16)
        self._intermediates(self._most)

    # --8<-- [start:experts]
    def __call__(self, rows: Rows) -> Tensor:
        """See `Experts`. Rows without a slot are never read."""
        weights, assignments = self.weights, rows.slots_RJ.numel()
        config = self._choice(assignments).config
        tiles = self._group(rows, config.tile_rows)
        if "gather" not in self.fusions:
            rows = kernels.prepare_rows(rows, weights.experts, pdl=self.pdl)
        h_NI, wide_NH = self._intermediates(assignments)
        f_NH = (
            wide_NH if self.exact or not config.down.tma_rows else as_dtype(wide_NH, weights.dtype)
        )
        how = {"ranks": self.ranks, "pdl": self.pdl}
        kernels.gate_up(rows, weights.w13_E2IH, tiles, h_NI, config.gate_up, scratch=wide_NH, **how)
        kernels.down(rows, h_NI, weights.w2_EHI, tiles, f_NH, config.down, **how)
        # tiles that the list does not name exit at once
        ledger.record_rows(lambda: int(tiles.num_tiles) * tiles.tile_rows)
        return self._reduce(rows, f_NH)

    # --8<-- [end:experts]

    def _choice(self, assignments: int) -> Choice:
        """Tile sizes for as many assignments. Numbers that follow the routing are rounded up: few kernels, not many."""
        tokens = assignments // (self.ranks * self.spec.shape.topk)
        return self.tuning.choice(tokens if self.static else 1 << max(tokens - 1, 0).bit_length())

    def _group(self, rows: Rows, tile_rows: int) -> kernels.ExpertTiles:
        tiles = self._work_list(rows.slots_RJ.numel(), tile_rows)
        if "metadata" in self.fusions:
            kernels.group_slots(rows.slots_RJ, self.weights.experts, tiles, pdl=self.pdl)
        else:
            twins.group_slots(rows.slots_RJ, self.weights.experts, tiles)
        return tiles

    def _reduce(self, rows: Rows, f_NH: Tensor) -> Tensor:
        if "reduce" not in self.fusions:
            return twins.reduce_slots(rows.slots_RJ, f_NH, self.weights.experts)
        y_RH = f_NH.new_empty(len(rows.slots_RJ), self.weights.hidden, dtype=torch.float32)
        kernels.reduce_slots(rows.slots_RJ, f_NH, self.weights.experts, y_RH, pdl=self.pdl)
        return y_RH

    def _work_list(self, assignments: int, tile_rows: int) -> kernels.ExpertTiles:
        """For tiles of as many rows, at the front of the workspace's buffer."""
        experts, device = self.weights.experts, self.weights.device
        size = (work_list.words(self._most, self._most_experts),)
        layout = work_list.Layout(self.workspace.buffer("tiles", size, torch.int32, device))
        return kernels.make_tiles(assignments, experts, tile_rows, device, layout)

    def _intermediates(self, assignments: int) -> tuple[Tensor, Tensor]:
        """h_NI activations and f_NH float32: the first rows of the workspace's buffers."""
        weights, most, device = self.weights, self._most, self.weights.device
        h_NI = self.workspace.buffer("h", (most, weights.intermediate), weights.dtype, device)
        f_NH = self.workspace.buffer("f", (most, weights.hidden), torch.float32, device)
        return h_NI[:assignments], f_NH[:assignments]

    def warmup_capacities(self) -> tuple[int, ...]:
        """Those of `Tuning`; none where sizes follow the routing, since no capacity says what they will be."""
        return self.tuning.warmup_capacities() if self.static else ()

    def describe(self) -> dict[str, object]:
        """The tile sizes of a full call and where they come from, and the fusions that are on in this layer."""
        choice = self.tuning.choice(self.spec.max_tokens_per_rank)
        return {
            "tuning": choice.source,
            "gate_up": choice.config.gate_up.to_dict(),
            "down": choice.config.down.to_dict(),
            "fusions": sorted(self.fusions),
        }


def as_dtype(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer of that shape and a narrower dtype in the same memory."""
    return buffer.view(-1).view(dtype)[: buffer.numel()].view(buffer.shape)
