"""Every fused step in plain torch operators: what it replaces, what it is held against, and what runs without it.

Legend: T tokens, C capacity, EP ranks, R = EP * C rows, J places of a row, N = R * J slots, H hidden, K experts.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epmoe.core.numerics import sum_in_order

if TYPE_CHECKING:
    from epmoe.fused_triton.exchange import FusedExchange
    from epmoe.fused_triton.kernels import ExpertTiles


def pack(
    exchange: "FusedExchange", send_DCB: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> None:
    """send[d, t] = token t for rank d: four strided copies, and the slots of every rank."""
    tokens, layout = len(x_TH), exchange.layout
    owner_E, slot_E = exchange.owner_E, exchange.slot_E
    real_TK = (ids_TK >= 0) & (ids_TK < len(owner_E))
    safe_TK = torch.where(real_TK, ids_TK, 0).long()
    ranks_D11 = torch.arange(len(send_DCB), device=x_TH.device)[:, None, None]
    on_rank_DTK = real_TK & (owner_E[safe_TK] == ranks_D11)
    layout.x(send_DCB)[:, :tokens] = x_TH
    layout.slots(send_DCB)[:, :tokens] = torch.where(on_rank_DTK, slot_E[safe_TK], -1)
    layout.slots(send_DCB)[:, tokens:] = -1
    layout.weights(send_DCB)[:, :tokens] = weights_TK
    layout.valid(send_DCB)[:, :tokens] = 1
    layout.valid(send_DCB)[:, tokens:] = 0


def group_slots(slots_RJ: Tensor, experts: int, out: "ExpertTiles") -> None:
    """Fill the work list: sort by expert, find the borders, and list the tiles of BLOCK_M rows."""
    flat_N = slots_RJ.flatten()
    key_N = torch.where((flat_N >= 0) & (flat_N < experts), flat_N, experts)
    sorted_N, order_N = key_N.sort(stable=True)
    borders = torch.arange(experts + 1, device=flat_N.device, dtype=sorted_N.dtype)
    out.sorted_slots.copy_(order_N)
    out.offsets.copy_(torch.searchsorted(sorted_N, borders))
    if experts == 0:
        out.num_tiles.zero_()
        return
    begin_E, end_E = out.offsets[:-1], out.offsets[1:]
    ends_E = ((end_E - begin_E + out.tile_rows - 1) // out.tile_rows).cumsum(0)
    out.num_tiles.copy_(ends_E[-1:])
    out.tiles[:, 3] = ends_E[-1]
    tile = torch.arange(len(out.tiles), device=flat_N.device)
    expert = torch.searchsorted(ends_E, tile, right=True).clamp(max=experts - 1)
    first = ends_E[expert] - (end_E - begin_E + out.tile_rows - 1)[expert] // out.tile_rows
    out.tiles[:, 0] = expert
    out.tiles[:, 1] = begin_E[expert] + (tile - first) * out.tile_rows
    out.tiles[:, 2] = end_E[expert]


def reduce_slots(slots_RJ: Tensor, f_NH: Tensor, experts: int) -> Tensor:
    """y_RH float32: the J weighed places of each row, first to last. A place without an expert was never written."""
    known_RJ = (slots_RJ >= 0) & (slots_RJ < experts)
    f_RJH = f_NH.view(*slots_RJ.shape, f_NH.shape[1])
    return sum_in_order(torch.where(known_RJ[:, :, None], f_RJH, 0).float().unbind(1))


def merge_ranks(home_DCH: Tensor, y_TH: Tensor, *, ring: bool) -> None:
    """y_TH: the rows of each token, ranks ascending; with `ring` rounded to y's dtype after every rank."""
    parts = home_DCH[:, : len(y_TH)].unbind(0)
    if not ring:
        y_TH.copy_(sum_in_order(parts))
        return
    total = parts[0].to(y_TH.dtype)
    for part in parts[1:]:
        total = (total.float() + part).to(y_TH.dtype)
    y_TH.copy_(total)
