"""Dispatch: tokens become packed rows for every owner rank in one launch, routed on the way if logits are given.

Fixed capacity: token t for rank d always sits in send[d, t]. What rank d reads are LOCAL ids: the slot of an expert
that lives on d, -1 for one that lives elsewhere. Rows past T carry valid = 0 and ids -1; their hidden values stay
unwritten, since nothing reads them.

Worked on the toy, rank 0: token 1 names (1, 2); owners (0, 0, 1, 1), slots (0, 1, 0, 1). Row send[0, 1] carries ids
(1, -1), row send[1, 1] carries (-1, 0), both the weights (0.75, 0.25) and valid = 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from epmoe.core.packed_rows import RowLayout
from epmoe.core.routing import RouterConfig
from epmoe.core.split import Rows
from epmoe.fused_triton.kernels._checks import (
    FLOATS,
    need,
    need_contiguous,
    need_dense_rows,
    need_dtype,
    need_shape,
    power_of_two,
)
from epmoe.fused_triton.kernels._launch import launch, multiprocessors, pdl_start_next, pdl_wait
from epmoe.fused_triton.kernels.metadata import ExpertTiles
from epmoe.fused_triton.kernels.router import (
    check_logits,
    check_router,
    compile_time_rule,
    select_experts,
)

_MAX_BLOCK_H = 4096
_WARPS = 1  # the router's reductions then need no barrier


# --8<-- [start:pack]
@triton.jit(do_not_specialize=["T", "capacity"])
def _route_pack_kernel(
    x_ptr, logits_ptr, bias_ptr, ids_ptr, weights_ptr, owner_ptr, slot_ptr,
    send_x_ptr, send_int_ptr, send_float_ptr, T, capacity, stride_xt, stride_lt,
    H: tl.constexpr, ITEMS: tl.constexpr, WORDS: tl.constexpr, ID_WORD: tl.constexpr,
    ROUTE: tl.constexpr, EP: tl.constexpr, DESTS: tl.constexpr, BLOCK_H: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, RENORM: tl.constexpr, SCALE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, j) writes token t for DESTS ranks from j * DESTS on. Token 1, rank 1: ids -1 0, weights 0.75 0.25.

    ROUTE chooses the experts here, once per program, and stores them; otherwise ids and weights are read. T is not
    specialized: a rank whose T is a multiple of 16 would compile a kernel of its own while its peers wait for it.
    """
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * DESTS
    live = t < T
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    pdl_wait(PDL)
    pdl_start_next(PDL)
    offs_h = tl.arange(0, BLOCK_H)
    # asked for before the router runs, so that its latency is hidden
    x = tl.load(x_ptr + t * stride_xt + offs_h, mask=(offs_h < H) & live, other=0.0)
    if ROUTE:
        ids, weights = select_experts(
            logits_ptr + t * stride_lt, bias_ptr, live, E, K, GROUPS, TOPK_GROUPS, SIGMOID, HAS_BIAS, RENORM, SCALE,
            BLOCK_G, BLOCK_P, BLOCK_K,
        )  # fmt: skip
        if first == 0:
            tl.store(ids_ptr + t * K + offs_k, ids, mask=mask_k & live)
            tl.store(weights_ptr + t * K + offs_k, weights, mask=mask_k & live)
    else:
        ids = tl.load(ids_ptr + t * K + offs_k, mask=mask_k & live, other=-1)
        weights = tl.load(weights_ptr + t * K + offs_k, mask=mask_k & live, other=0.0)
    # int64 ids as they are: narrowed, 2**32 would be expert 0
    known = mask_k & live & (ids >= 0) & (ids < E)
    owner = tl.load(owner_ptr + ids, mask=known, other=-1)
    slot = tl.load(slot_ptr + ids, mask=known, other=-1)
    weights = tl.where(known, weights, 0.0)
    for j in tl.static_range(DESTS):
        d = first + j
        row = d.to(tl.int64) * capacity + t
        mask_d = mask_k & (d < EP)
        words = row * WORDS + ID_WORD
        tl.store(send_int_ptr + words + offs_k, tl.where(owner == d, slot, -1), mask=mask_d)
        tl.store(send_float_ptr + words + K + offs_k, weights, mask=mask_d)
        tl.store(send_int_ptr + words + 2 * K, live.to(tl.int32), mask=d < EP)
    for h in tl.static_range(0, H, BLOCK_H):
        mask_h = (h + offs_h < H) & live
        if h > 0:
            x = tl.load(x_ptr + t * stride_xt + h + offs_h, mask=mask_h, other=0.0)
        for j in tl.static_range(DESTS):
            row = (first + j).to(tl.int64) * capacity + t
            tl.store(send_x_ptr + row * ITEMS + h + offs_h, x, mask=mask_h & (first + j < EP))


# --8<-- [end:pack]


def route_and_pack(
    x_TH: Tensor, owner_E: Tensor, slot_E: Tensor, send: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor,
    *, logits_TE: Tensor | None = None, bias_E: Tensor | None = None, rule: RouterConfig | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Write `send` [EP, C, row_bytes] uint8 from the tokens of this rank, in one launch.

    Args:
        x_TH: [T, H] with dense rows (rows may be strided), T <= C.
        owner_E, slot_E: [E] int32, the owner rank of every global expert and its slot there.
        send: every row is written: ids, weights and flag always, hidden values for the T tokens.
        topk_ids_TK, topk_weights_TK: [T, K] int32 or int64 global ids (-1 for none), float32 weights. Read; or, when
            `logits_TE` is given, written with what the router chose.
        logits_TE, bias_E, rule: route on the way (see `route_tokens`).
    """
    _check_tokens(x_TH, topk_ids_TK, topk_weights_TK, send)
    experts, topk = owner_E.shape[0], topk_ids_TK.shape[1]
    rule = rule or RouterConfig()
    _check_tables(owner_E, slot_E)
    if logits_TE is not None:
        check_logits(logits_TE, bias_E)
        need_shape("logits", logits_TE, (x_TH.shape[0], experts))
        need_dtype("topk_ids", topk_ids_TK, torch.int32)
        check_router(rule, experts, topk)
    layout = RowLayout(x_TH.shape[1], topk, x_TH.dtype)
    logits = topk_weights_TK if logits_TE is None else logits_TE
    bias = logits if bias_E is None else bias_E
    ranks, capacity = send.shape[0], send.shape[1]
    # few tokens: a program per destination fills the GPU; many: read each token once
    dests = 1 if capacity <= 256 else power_of_two(ranks)
    launch(
        _route_pack_kernel, (capacity, -(-ranks // dests)),
        x_TH, logits, bias, topk_ids_TK, topk_weights_TK, owner_E, slot_E,
        send.view(x_TH.dtype), send.view(torch.int32), send.view(torch.float32),
        x_TH.shape[0], capacity, x_TH.stride(0), logits.stride(0),
        H=layout.hidden, ITEMS=layout.row_bytes // x_TH.itemsize, WORDS=layout.row_bytes // 4,
        ID_WORD=layout.slots_at // 4, ROUTE=logits_TE is not None, EP=ranks, DESTS=dests,
        BLOCK_H=power_of_two(min(x_TH.shape[1], _MAX_BLOCK_H)),
        **compile_time_rule(rule, experts, topk, bias_E is not None), num_warps=_WARPS, pdl=pdl,
    )  # fmt: skip


def _check_tables(owner_E: Tensor, slot_E: Tensor) -> None:
    need_dtype("owner_E", owner_E, torch.int32)
    need_dtype("slot_E", slot_E, torch.int32)
    need_shape("slot_E", slot_E, tuple(owner_E.shape))
    need_contiguous(owner_E=owner_E, slot_E=slot_E)


def _check_tokens(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, send: Tensor) -> None:
    need(x_TH.dim() == 2, f"x has shape {tuple(x_TH.shape)}: expected [T, H]")
    need_dtype("x", x_TH, *FLOATS)
    need_dense_rows("x", x_TH)
    need(send.dim() == 3, f"send has shape {tuple(send.shape)}: expected [EP, C, row_bytes]")
    tokens, topk = x_TH.shape[0], ids_TK.shape[-1]
    need(
        tokens <= send.shape[1],
        f"{tokens} tokens do not fit capacity {send.shape[1]}: build the layer with more",
    )
    need_shape("topk_ids", ids_TK, (tokens, topk))
    need_shape("topk_weights", weights_TK, (tokens, topk))
    need_dtype("topk_ids", ids_TK, torch.int32, torch.int64)
    need_dtype("topk_weights", weights_TK, torch.float32)
    need_contiguous(topk_ids=ids_TK, topk_weights=weights_TK, send=send)
    need_dtype("send", send, torch.uint8)
    need_shape("a row of send", send[0, 0], (RowLayout(x_TH.shape[1], topk, x_TH.dtype).row_bytes,))


# --8<-- [start:prepare]
@triton.jit
def _prepare_kernel(
    recv_x_ptr, recv_ids_ptr, recv_weights_ptr, x_ptr, ids_ptr, weights_ptr, E_LOCAL,
    H: tl.constexpr, K: tl.constexpr, ITEMS: tl.constexpr, WORDS: tl.constexpr, WEIGHT_WORDS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program r unpacks received row r. Row 1 of the toy on rank 0: ids (1, -1), weights (0.75, 0)."""
    r = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    pdl_wait(PDL)
    pdl_start_next(PDL)
    ids = tl.load(recv_ids_ptr + r * WORDS + offs_k, mask=mask_k, other=-1)
    known = (ids >= 0) & (ids < E_LOCAL)
    # a weight without a local expert may be anything, NaN included: it must not survive
    weights = tl.load(recv_weights_ptr + r * WEIGHT_WORDS + offs_k, mask=mask_k & known, other=0.0)
    tl.store(ids_ptr + r * K + offs_k, tl.where(known, ids, -1), mask=mask_k)
    tl.store(weights_ptr + r * K + offs_k, weights, mask=mask_k)
    needed = tl.sum(known.to(tl.int32), axis=0) > 0
    for h in tl.static_range(0, H, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H)
        mask_h = offs_h < H
        # rows that no local expert reads become zeros, whatever lies in the buffer
        x = tl.load(recv_x_ptr + r * ITEMS + offs_h, mask=mask_h & needed, other=0.0)
        tl.store(x_ptr + r * H + offs_h, x, mask=mask_h)


# --8<-- [end:prepare]


def prepare_rows(rows: Rows, local_experts: int, *, pdl: bool = False) -> Rows:
    """Unpack received rows: the alternative to GEMMs that read them in place.

    Args:
        rows: views of packed rows, or any others.
        local_experts: E_local.

    Returns:
        contiguous x_RH, slots_RJ in [-1, local_experts) and weights_RJ, zero where no local expert is named.
    """
    (count, places), hidden = rows.slots_RJ.shape, rows.x_RH.shape[1]
    x_RH = rows.x_RH.new_empty(count, hidden)
    slots_RJ = rows.slots_RJ.new_empty(count, places)
    weights_RJ = rows.weights_RJ.new_empty(count, places)
    launch(
        _prepare_kernel, (count,), rows.x_RH, rows.slots_RJ, rows.weights_RJ, x_RH, slots_RJ, weights_RJ, local_experts,
        H=hidden, K=places, ITEMS=rows.x_RH.stride(0), WORDS=rows.slots_RJ.stride(0),
        WEIGHT_WORDS=rows.weights_RJ.stride(0),
        BLOCK_H=power_of_two(min(hidden, _MAX_BLOCK_H)), BLOCK_K=power_of_two(places), num_warps=4, pdl=pdl,
    )  # fmt: skip
    return Rows(x_RH=x_RH, slots_RJ=slots_RJ, weights_RJ=weights_RJ)


@triton.jit
def _gather_kernel(
    recv_x_ptr, x_ptr, sorted_ptr, offsets_ptr, E_LOCAL,
    H: tl.constexpr, K: tl.constexpr, ITEMS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x[p] = the received row of the slot at position p. Toy, rank 0: rows 0 3 0 1 for slots 0 6 1 2."""
    pdl_wait(PDL)
    pdl_start_next(PDL)
    assignments = tl.load(offsets_ptr + E_LOCAL)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    for first in tl.range(tl.program_id(0) * ROWS, assignments, tl.num_programs(0) * ROWS):
        p = first + tl.arange(0, ROWS)
        slots = tl.load(sorted_ptr + p, mask=p < assignments, other=0)
        mask = (p < assignments)[:, None] & (offs_h < H)[None, :]
        rows = (slots // K).to(tl.int64)[:, None] * ITEMS + offs_h[None, :]
        x = tl.load(recv_x_ptr + rows, mask=mask, other=0.0)
        tl.store(x_ptr + p.to(tl.int64)[:, None] * H + offs_h[None, :], x, mask=mask)


def gather_rows(
    rows: Rows, tiles: ExpertTiles, scratch: Tensor | None, *, pdl: bool = False
) -> Tensor:
    """Copy the rows of all local assignments side by side, in expert-major order, for GEMMs that load them by TMA.

    It pays with many rows per expert: one copy, against a gather by every column block of the GEMM.

    Args:
        scratch: contiguous, any dtype, room for N * H values of the rows' dtype; None allocates.

    Returns:
        x_NH [N, H], a view of `scratch`; positions at and after offsets[-1] stay unwritten.
    """
    slots, hidden, dtype = tiles.sorted_slots.shape[0], rows.x_RH.shape[1], rows.x_RH.dtype
    size = slots * hidden * dtype.itemsize
    if scratch is None:
        scratch = torch.empty(size, dtype=torch.uint8, device=rows.x_RH.device)
    need_contiguous(scratch=scratch)
    need(scratch.nbytes >= size, f"scratch has {scratch.nbytes} bytes: {size} are needed")
    need(
        scratch.data_ptr() % 16 == 0,
        "scratch starts off a multiple of 16 bytes: pass a whole buffer",
    )
    x_NH = scratch.view(-1).view(torch.uint8)[:size].view(dtype).view(slots, hidden)
    block_h = power_of_two(min(hidden, 2048))
    programs = min(-(-slots // 4), 8 * multiprocessors(rows.x_RH.device))
    launch(
        _gather_kernel, (programs, -(-hidden // block_h)),
        rows.x_RH, x_NH, tiles.sorted_slots, tiles.offsets, tiles.offsets.shape[0] - 1,
        H=hidden, K=rows.slots_RJ.shape[1], ITEMS=rows.x_RH.stride(0), ROWS=4, BLOCK_H=block_h, num_warps=4, pdl=pdl,
    )  # fmt: skip
    return x_NH
