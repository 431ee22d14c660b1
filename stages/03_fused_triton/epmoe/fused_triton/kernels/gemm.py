"""Grouped GEMMs over the tile list: gate_up with SwiGLU, then down with the routing weight.

A program takes work items (tile, column block) from a list whose length stands on the device. Fewer programs
than items is a persistent grid, more is early exit; both are the same loop, so nothing depends on a host value.

    gate_up   h[p] = silu(x[row of p] @ gate^T) * (x[row of p] @ up^T)     p: expert-major position
    down      rows[slot of p] = weight[slot of p] * (h[p] @ w2^T)

A rows are read where they were received (row = slot // K): no gathered copy. Accumulation is float32; the routing weight
multiplies the float32 sum, so a float16 row that overflows before its weight never does. Rows past the end of a tile read
the tile's last row again and are not stored; there is no mask in the inner loop when BLOCK_K divides the summed size.

Worked on the toy, rank 0: tile 0 is expert 0, positions 0 to 2, slots 0 and 6, rows 0 and 3. It writes h[0], h[1], then
rows[0] = 0.75 * expert0(token 0) and rows[6] = 0.75 * expert0(token 3).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from epmoe.fused_triton.kernels._checks import need, need_contiguous, need_dtype, need_shape
from epmoe.fused_triton.kernels._launch import launch, multiprocessors, pdl_start_next, pdl_wait
from epmoe.fused_triton.kernels.config import GemmConfig
from epmoe.fused_triton.kernels.layout import RowViews
from epmoe.fused_triton.kernels.metadata import ExpertTiles, max_tiles


@triton.jit
def work_item(work, tiles, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(tile, column block) of a work item: column blocks outside, GROUP_M tiles inside, so that they share weights.

    3 tiles, 2 column blocks, GROUP_M = 2: (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    width = GROUP_M * NUM_N
    first = work // width * GROUP_M
    size = tl.minimum(tiles - first, GROUP_M)
    inside = work % width
    return first + inside % size, inside // size


@triton.jit
def list_length(tiles_ptr, NUM_N: tl.constexpr):
    """Tiles in the list, read from the entry that this program starts with: entry and length arrive in one load."""
    return tl.load(tiles_ptr + tl.program_id(0) // NUM_N * 4 + 3)


@triton.jit
def row_tile(row_ptrs, live, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """[rows, BLOCK_K] of the rows at `row_ptrs` [rows] from column k; rows that are not `live` cost no traffic."""
    offs_k = k + tl.arange(0, BLOCK_K)
    ptrs = row_ptrs[:, None] + offs_k[None, :]
    mask = live[:, None]
    if WIDTH % BLOCK_K != 0:
        mask = mask & (offs_k[None, :] < WIDTH)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def weight_tile(
    w_ptr, row, k, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, left,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of a weight matrix from (row, k); `left` rows remain, the last of them stands for the others."""
    if TMA:
        tile = w_ptr.load([row.to(tl.int32), k])
    else:
        offs_n = tl.arange(0, BLOCK_N)
        if ROWS % BLOCK_N != 0:
            offs_n = tl.minimum(offs_n, left - 1)
        offs_k = k + tl.arange(0, BLOCK_K)
        ptrs = w_ptr + row * WIDTH + offs_n[:, None] * WIDTH + offs_k[None, :]
        if WIDTH % BLOCK_K == 0:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=offs_k[None, :] < WIDTH, other=0.0)
    return tile


# The interpreter multiplies the raw bits of bfloat16; widened first, its product is exact. Compiled code never widens.
_WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def multiply(a, w, acc, SWAP: tl.constexpr):
    """acc + a @ w^T; with SWAP everything is transposed: acc [BLOCK_N, BLOCK_M] + w @ a^T."""
    if _WIDEN:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    if SWAP:
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def gate_up_kernel(
    x_ptr, w_ptr, h_ptr, sorted_ptr, tiles_ptr,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, ITEMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h [N, I] at expert-major positions. Toy, tile 0 on rank 0: h[0] from row 0, h[1] from row 3, both expert 0."""
    NUM_N: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pdl_wait(PDL)
    tiles = list_length(tiles_ptr, NUM_N)
    pdl_start_next(PDL)
    for work in tl.range(tl.program_id(0), tiles * NUM_N, tl.num_programs(0)):
        tile, n = work_item(work, tiles, NUM_N, GROUP_M)
        expert = tl.load(tiles_ptr + tile * 4).to(tl.int64)
        end = tl.load(tiles_ptr + tile * 4 + 2)
        offs_m = tl.load(tiles_ptr + tile * 4 + 1) + tl.arange(0, BLOCK_M)
        slots = tl.load(sorted_ptr + tl.minimum(offs_m, end - 1))
        x_rows = x_ptr + (slots // K).to(tl.int64) * ITEMS
        gate_row = expert * (2 * I) + n * BLOCK_N
        left = I - n * BLOCK_N
        if SWAP:
            gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = gate
        for k in tl.range(0, H, BLOCK_K):
            # weights first: their address needs the tile alone, that of x waits for the slots
            w_gate = weight_tile(w_ptr, gate_row, k, I, H, BLOCK_N, BLOCK_K, TMA, left)
            w_up = weight_tile(w_ptr, gate_row + I, k, I, H, BLOCK_N, BLOCK_K, TMA, left)
            x = row_tile(x_rows, offs_m < end, k, H, BLOCK_K)
            gate = multiply(x, w_gate, gate, SWAP)
            up = multiply(x, w_up, up, SWAP)
        h = (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty)
        if SWAP:
            h = tl.trans(h)
        offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
        h_ptrs = h_ptr + offs_m.to(tl.int64)[:, None] * I + offs_n[None, :]
        tl.store(h_ptrs, h, mask=(offs_m < end)[:, None] & (offs_n < I)[None, :])


@triton.jit
def down_kernel(
    h_ptr, w_ptr, weights_ptr, rows_ptr, sorted_ptr, tiles_ptr,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, WEIGHT_WORD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rows [N, H] by slot. Toy, tile 0 on rank 0: rows[0] and rows[6], each 0.75 * (h @ w2 of expert 0)."""
    NUM_N: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    # gate_up starts this kernel only after ITS wait, so the tile list is complete here; h is not
    tiles = list_length(tiles_ptr, NUM_N)
    pdl_wait(PDL)
    pdl_start_next(PDL)
    for work in tl.range(tl.program_id(0), tiles * NUM_N, tl.num_programs(0)):
        tile, n = work_item(work, tiles, NUM_N, GROUP_M)
        w_row = tl.load(tiles_ptr + tile * 4).to(tl.int64) * H + n * BLOCK_N
        end = tl.load(tiles_ptr + tile * 4 + 2)
        start = tl.load(tiles_ptr + tile * 4 + 1)
        offs_m = start + tl.arange(0, BLOCK_M)
        if not TMA_ROWS:
            h_rows = h_ptr + offs_m.to(tl.int64) * I
        if SWAP:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, I, BLOCK_K):
            w = weight_tile(w_ptr, w_row, k, H, I, BLOCK_N, BLOCK_K, TMA, H - n * BLOCK_N)
            if TMA_ROWS:
                h = h_ptr.load([start, k])
            else:
                h = row_tile(h_rows, offs_m < end, k, I, BLOCK_K)
            acc = multiply(h, w, acc, SWAP)
        if SWAP:
            acc = tl.trans(acc)
        slots = tl.load(sorted_ptr + tl.minimum(offs_m, end - 1)).to(tl.int64)
        weight = tl.load(weights_ptr + slots // K * WORDS + WEIGHT_WORD + slots % K)
        offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_ptrs = rows_ptr + slots[:, None] * H + offs_n[None, :]
        out = (acc * weight[:, None]).to(rows_ptr.dtype.element_ty)
        tl.store(row_ptrs, out, mask=(offs_m < end)[:, None] & (offs_n < H)[None, :])


def _programs(
    tiles: ExpertTiles, local_experts: int, columns: int, ranks: int, config: GemmConfig
) -> int:
    """Programs to start: for every tile that this rank's fair share can need; the kernel's loop takes what is beyond."""
    slots = tiles.sorted_slots.shape[0]
    share = -(-slots // max(1, ranks))
    likely = max_tiles(share + share // 4, local_experts, tiles.block_m)
    items = min(max_tiles(slots, local_experts, tiles.block_m), max(1, likely)) * columns
    if config.waves == 0:
        return items
    return min(items, config.waves * multiprocessors(tiles.offsets.device))


def _matrix(w: Tensor, block: int, config: GemmConfig, tma: bool) -> Tensor | TensorDescriptor:
    """A tensor as [rows, width]; through a tensor descriptor where the config asks for one and the shape allows it."""
    flat = w.view(-1, w.shape[-1])
    aligned = flat.stride(0) * w.itemsize % 16 == 0 and flat.data_ptr() % 16 == 0
    if not (tma and aligned):
        return flat
    return TensorDescriptor.from_tensor(flat, [block, config.block_k])


def gate_up(
    rows: RowViews, w13_E2IH: Tensor, tiles: ExpertTiles, h_NI: Tensor, config: GemmConfig,
    *, ranks: int = 1, pdl: bool = False,
) -> None:  # fmt: skip
    """Write h_NI [N, I], the SwiGLU activations of all local assignments, at their expert-major positions.

    Args:
        rows: received rows, read in place.
        w13_E2IH: [E_local, 2I, H], gate rows first, contiguous, the dtype of the rows.
        tiles: from `group_slots`.
        h_NI: [N, I] of the same dtype; positions at and after offsets[-1] stay unwritten.
        ranks: EP; sizes the grid for this rank's fair share (any share is computed).
    """
    experts, double, hidden = w13_E2IH.shape
    layout, slots = rows.layout, tiles.sorted_slots.shape[0]
    _check_gemm(tiles, config, experts, w13=w13_E2IH, h=h_NI)
    need_dtype("w13", w13_E2IH, rows.hidden.dtype)
    need_dtype("h", h_NI, rows.hidden.dtype)
    need(hidden == layout.hidden, f"w13 has H={hidden}, the rows have H={layout.hidden}")
    need_shape("h", h_NI, (slots, double // 2))
    if experts == 0 or slots == 0:
        return
    w = _matrix(w13_E2IH, config.block_n, config, config.tma)
    columns = -(-double // 2 // config.block_n)
    launch(
        gate_up_kernel, (_programs(tiles, experts, columns, ranks, config),),
        rows.hidden, w, h_NI, tiles.sorted_slots, tiles.tiles,
        H=hidden, I=double // 2, K=layout.topk, ITEMS=layout.items,
        **_meta(config, w), pdl=pdl,
    )  # fmt: skip


def down(
    rows: RowViews, h_NI: Tensor, w2_EHI: Tensor, tiles: ExpertTiles, out_NH: Tensor, config: GemmConfig,
    *, ranks: int = 1, pdl: bool = False,
) -> None:  # fmt: skip
    """Write out_NH [N, H]: weight times expert output, at the slot of every local assignment; other rows untouched.

    Args:
        rows: received rows, for the routing weights.
        h_NI: from `gate_up`.
        w2_EHI: [E_local, H, I], contiguous.
        out_NH: float32, or the dtype of h (rounded after the weight).
        ranks, pdl: as in `gate_up`. With pdl the kernel before this one must be `gate_up` on the same tiles.
    """
    experts, hidden, inner = w2_EHI.shape
    layout, slots = rows.layout, tiles.sorted_slots.shape[0]
    _check_gemm(tiles, config, experts, w2=w2_EHI, h=h_NI, out=out_NH)
    need_dtype("w2", w2_EHI, h_NI.dtype)
    need_dtype("out", out_NH, torch.float32, h_NI.dtype)
    need_shape("h", h_NI, (slots, inner))
    need_shape("out", out_NH, (slots, layout.hidden))
    need(hidden == layout.hidden, f"w2 has H={hidden}, the rows have H={layout.hidden}")
    if experts == 0 or slots == 0:
        return
    w = _matrix(w2_EHI, config.block_n, config, config.tma)
    h = _matrix(h_NI, config.block_m, config, config.tma_rows)
    columns = -(-hidden // config.block_n)
    launch(
        down_kernel, (_programs(tiles, experts, columns, ranks, config),),
        h, w, rows.floats, out_NH, tiles.sorted_slots, tiles.tiles,
        H=hidden, I=inner, K=layout.topk, WORDS=layout.words, WEIGHT_WORD=layout.weight_word,
        TMA_ROWS=isinstance(h, TensorDescriptor), **_meta(config, w), pdl=pdl,
    )  # fmt: skip


def _check_gemm(tiles: ExpertTiles, config: GemmConfig, experts: int, **tensors: Tensor) -> None:
    need_contiguous(**tensors)
    need(
        tiles.block_m == config.block_m,
        f"the tile list has block_m={tiles.block_m}, the config {config.block_m}: use one value",
    )
    need(
        tiles.offsets.shape[0] == experts + 1,
        f"the tile list is for {tiles.offsets.shape[0] - 1} experts, the weights hold {experts}",
    )


def _meta(config: GemmConfig, w: Tensor | TensorDescriptor) -> dict:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SWAP": config.swap_ab,
        "TMA": isinstance(w, TensorDescriptor),
        "num_stages": config.num_stages,
        "num_warps": config.num_warps,
    }
