"""Experts as four kernels over the received rows: group, gate-up, down, reduce.

Legend: R received rows, J places of a row, N = R * J slots, H hidden, I intermediate, E_local experts here.
"""

import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.split import Rows
from epmoe.core.weights import ExpertWeights
from epmoe.core.workspace import Workspace
from epmoe.fused_triton import kernels, twins
from epmoe.fused_triton.tuning import Tuning


class TritonExperts:
    """Grouped products with gathered rows; tiles come from a list that the GPU wrote.

    Args:
        weights: of this rank's experts, contiguous.
        workspace: for the intermediate rows.
        tuning: tile sizes by number of rows.
        ranks: EP: how many of the rows are likely to be for this rank (any number is right).
        fusions, pdl: which steps are fused; see `fusions`.

    Weighed expert outputs are kept in float32 until they are added; only where tiles are those of a long prefill, which
    is bound by what it moves, in the layer's dtype (rounded once, after the weight). `exact` keeps float32 always.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        workspace: Workspace,
        tuning: Tuning,
        ranks: int,
        fusions: frozenset[str],
        pdl: bool,
        exact: bool = False,
    ):
        self.weights = ExpertWeights(weights.w13_E2IH.contiguous(), weights.w2_EHI.contiguous())
        self.workspace, self.tuning, self.ranks = workspace, tuning, ranks
        self.fusions, self.pdl, self.exact = fusions, pdl, exact
        self._tiles: dict[tuple[int, int], kernels.ExpertTiles] = {}

    # --8<-- [start:experts]
    def __call__(self, rows: Rows) -> Tensor:
        """See `Experts`. Rows without a slot are never read."""
        weights, slots = self.weights, rows.slots_RJ.numel()
        config = self.tuning.choice(slots // max(1, self.ranks * rows.slots_RJ.shape[1])).config
        tiles = self._group(rows, config.block_m)
        if "gather" not in self.fusions:
            rows = kernels.prepare_rows(rows, weights.experts, pdl=self.pdl)
        h_NI = self._buffer("h", slots, weights.intermediate, weights.dtype)
        wide_NH = self._buffer("f", slots, weights.hidden, torch.float32)
        f_NH = (
            wide_NH if self.exact or not config.down.tma_rows else as_dtype(wide_NH, weights.dtype)
        )
        how = {"ranks": self.ranks, "pdl": self.pdl}
        kernels.gate_up(rows, weights.w13_E2IH, tiles, h_NI, config.gate_up, scratch=wide_NH, **how)
        kernels.down(rows, h_NI, weights.w2_EHI, tiles, f_NH, config.down, **how)
        # tiles that the list does not name exit at once
        ledger.record_rows(lambda: int(tiles.num_tiles) * tiles.block_m)
        return self._reduce(rows, f_NH)

    # --8<-- [end:experts]

    def _group(self, rows: Rows, block_m: int) -> kernels.ExpertTiles:
        tiles = self._work_list(rows.slots_RJ.numel(), block_m)
        if "metadata" in self.fusions:
            kernels.group_slots(rows.slots_RJ, self.weights.experts, tiles, pdl=self.pdl)
        else:
            twins.group_slots(rows.slots_RJ, self.weights.experts, tiles)
        return tiles

    def _reduce(self, rows: Rows, f_NH: Tensor) -> Tensor:
        if "reduce" not in self.fusions:
            return twins.reduce_slots(rows.slots_RJ, f_NH, self.weights.experts)
        y_RH = torch.empty(len(rows.slots_RJ), self.weights.hidden, device=f_NH.device)
        kernels.reduce_slots(rows.slots_RJ, f_NH, self.weights.experts, y_RH, pdl=self.pdl)
        return y_RH

    def _work_list(self, slots: int, block_m: int) -> kernels.ExpertTiles:
        """Made once per size, outside of graph captures: what is made inside would die with its graph."""
        key, device = (slots, block_m), self.weights.device
        if key in self._tiles:
            return self._tiles[key]
        made = kernels.make_tiles(slots, self.weights.experts, block_m, device)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._tiles[key] = made
        return made

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The first `rows` rows of the workspace's buffer of that name, which `reserve` has made."""
        return self.workspace.buffer(name, (self._most, columns), dtype, self.weights.device)[:rows]

    def reserve(self, slots: int) -> None:
        """Make the intermediate buffers for up to `slots` slots: H float32 and I activations each."""
        self._most = slots
        self._buffer("h", slots, self.weights.intermediate, self.weights.dtype)
        self._buffer("f", slots, self.weights.hidden, torch.float32)


def as_dtype(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer of that shape and a narrower dtype in the same memory."""
    return buffer.view(-1).view(dtype)[: buffer.numel()].view(buffer.shape)
